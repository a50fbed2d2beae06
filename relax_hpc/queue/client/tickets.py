"""Requests about tickets: which prompt groups an engine may generate, and the fate of attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from relax_hpc.queue.client.answers import Admission, NextAttempt
from relax_hpc.queue.client.connection import Submit, ignore_answer, then


class TicketRequests:
    """Requests of rollout about tickets. Every method returns a future of the answer."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def admit(self, reader: str, count: int) -> Future[Admission | None]:
        """Admit up to ``count`` tickets for the engine ``reader``, as soon as one is admissible;
        None: the run is finished."""
        return then(self._submit("admit", reader=reader, count=count), Admission.from_answer)

    def fail(self, ticket: int, attempt: int, reason: str) -> Future[NextAttempt]:
        """Report that this attempt at ``ticket`` failed; the next attempt at the same ticket."""
        return then(
            self._submit("fail", ticket=ticket, attempt=attempt, reason=reason),
            NextAttempt.from_answer,
        )

    def return_ticket(self, ticket: int) -> Future[None]:
        """Stop working on the ticket. The next owner continues from its log."""
        return then(self._submit("give_back", ticket=ticket), ignore_answer)

    def append(
        self,
        shard: Mapping[str, Any],
        logs: Sequence[Mapping[str, Any]],
        fields: Sequence[str],
        spare: bool,
        timeout: float | None = None,
    ) -> Future[dict[int, str]]:
        """Report segments of ``logs`` in ``shard``; why tickets were refused. See
        `client.segments.append_segments`."""
        return then(
            self._submit(
                "append", timeout, shard=shard, logs=list(logs), fields=list(fields), spare=spare
            ),
            lambda answer: answer["refused"],
        )

    def drop_attempt(self, ticket: int, attempt: int, reason: str) -> Future[None]:
        """Drop an attempt and its log: its ticket starts again. A spare attempt is only
        counted."""
        return then(
            self._submit("drop_attempt", ticket=ticket, attempt=attempt, reason=reason),
            ignore_answer,
        )

    def register_media(self, ticket: int, ids: Sequence[str]) -> Future[bool]:
        """Record that the prompt group of ``ticket`` needs these media; whether the caller has to
        store them, because it owns the ticket."""
        return then(
            self._submit("media", ticket=ticket, ids=list(ids)), lambda answer: answer["named"]
        )
