"""Tickets: which prompt groups an engine may start, and what becomes of attempts at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from relax_hpc.transfer_queue.client.answers import Admission, NextAttempt
from relax_hpc.transfer_queue.client.connection import Submit, nothing, then


class Tickets:
    """What rollout asks for. Every method returns a future with the answer."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def admit(self, reader: str, count: int) -> Future[Admission | None]:
        """Up to ``count`` tickets for the engine ``reader``, as soon as there is one; None: the run is finished."""
        return then(self._submit("admit", reader=reader, count=count), Admission.of)

    def fail(self, ticket: int, attempt: int, reason: str) -> Future[NextAttempt]:
        """This attempt at ``ticket`` came to nothing; what to try next under the same ticket."""
        return then(self._submit("fail", ticket=ticket, attempt=attempt, reason=reason), NextAttempt.of)

    def drop_spares(self, tickets: Sequence[int], reason: str) -> Future[None]:
        """Groups that were begun beside those of ``tickets``, to take their place if need be, came to nothing."""
        return then(self._submit("spared", tickets=list(tickets), reason=reason), nothing)

    def name_media(self, ticket: int, ids: Sequence[str]) -> Future[bool]:
        """The prompt group of ``ticket`` needs these media; whether they are to be stored: its owner does that."""
        return then(self._submit("media", ticket=ticket, ids=list(ids)), lambda answer: answer["named"])

    def keep(
        self,
        shard: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        fields: Sequence[str],
        surplus: bool,
        timeout: float | None = None,
    ) -> Future[dict[int, str]]:
        """Parts of groups, or whole surplus ones, lie in ``shard``; why tickets were refused. See `partials.keep`."""
        about = {"shard": shard, "rows": list(rows), "fields": list(fields), "surplus": surplus}
        return then(self._submit("keep", timeout, **about), lambda answer: answer["refused"])
