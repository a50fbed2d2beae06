"""Tickets: which prompt groups an engine may start, and what becomes of attempts at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from relax_hpc.queue.client.answers import Admission, NextAttempt
from relax_hpc.queue.client.connection import Submit, nothing, then


class Tickets:
    """Requests of rollout about tickets. Every method returns a future with the answer."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def admit(self, reader: str, count: int) -> Future[Admission | None]:
        """Admit up to ``count`` tickets for the engine ``reader``, once there is one; None: the run
        is finished."""
        return then(self._submit("admit", reader=reader, count=count), Admission.of)

    def fail(self, ticket: int, attempt: int, reason: str) -> Future[NextAttempt]:
        """Report that this attempt at ``ticket`` came to nothing; the next attempt at the same
        ticket."""
        return then(
            self._submit("fail", ticket=ticket, attempt=attempt, reason=reason), NextAttempt.of
        )

    def give_back(self, ticket: int) -> Future[None]:
        """Nobody works on it here any more; whoever is admitted to it next goes on with what its
        log has."""
        return then(self._submit("give_back", ticket=ticket), nothing)

    def append(
        self,
        shard: Mapping[str, Any],
        logs: Sequence[Mapping[str, Any]],
        fields: Sequence[str],
        spare: bool,
        timeout: float | None = None,
    ) -> Future[dict[int, str]]:
        """Segments of ``logs`` lie in ``shard``; why tickets were refused. See
        `client.segments.append`."""
        about = {"shard": shard, "logs": list(logs), "fields": list(fields), "spare": spare}
        return then(self._submit("append", timeout, **about), lambda answer: answer["refused"])

    def drop_attempt(self, ticket: int, attempt: int, reason: str) -> Future[None]:
        """Drop all that there is of an attempt: its ticket begins anew, and a spare one is
        counted."""
        return then(
            self._submit("drop_attempt", ticket=ticket, attempt=attempt, reason=reason), nothing
        )

    def name_media(self, ticket: int, ids: Sequence[str]) -> Future[bool]:
        """The prompt group of ``ticket`` needs these media; whether they are to be stored: its
        owner does that."""
        return then(
            self._submit("media", ticket=ticket, ids=list(ids)), lambda answer: answer["named"]
        )
