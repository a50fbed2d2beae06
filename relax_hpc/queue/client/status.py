"""Status requests: progress of the run, and reports for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from relax_hpc.base.errors import DeadlineError
from relax_hpc.queue.client.answers import QueueStatus
from relax_hpc.queue.client.connection import Submit, ignore_answer, then


class StatusRequests:
    """Requests that any client may make. Every method returns a future; most callers ignore it."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def get(self, timeout: float | None = None) -> Future[QueueStatus]:
        """Progress of the run, and the work of each process."""
        return then(self._submit("status", timeout), QueueStatus.from_answer)

    def run_finished(self) -> Future[None]:
        """A future that is done when the run is finished. A run lasts longer than a request may
        wait, so the request is repeated at each deadline."""
        finished: Future[None] = Future()
        self._ask_until_finished(finished)
        return finished

    def _ask_until_finished(self, finished: Future[None]) -> None:
        def take(answer: Future[Any]) -> None:
            if finished.cancelled():
                return
            error = CancelledError() if answer.cancelled() else answer.exception()
            if isinstance(error, DeadlineError):
                self._ask_until_finished(finished)
            elif error:
                finished.set_exception(error)
            else:
                finished.set_result(None)

        self._submit("over").add_done_callback(take)

    def note(self, what: str, name: str, reason: str) -> Future[None]:
        """Count a fault that concerns no ticket: of an engine, or in a line of a prompt file."""
        return then(self._submit("note", what=what, name=name, reason=reason), ignore_answer)

    def report(
        self,
        role: str,
        step: int,
        values: Mapping[str, float],
        seconds: Mapping[str, float] | None = None,
    ) -> Future[None]:
        """Metrics of ``step``, and the seconds spent by kind since the last report."""
        return then(
            self._submit("report", role=role, step=step, values=values, seconds=seconds or {}),
            ignore_answer,
        )

    def show(self, step: int, texts: Sequence[str]) -> Future[None]:
        """Send a few texts for people, such as samples of ``step``."""
        return then(self._submit("show", step=step, texts=list(texts)), ignore_answer)

    def first_failure(
        self, reason: str, detail: str, location: str, traceback: str
    ) -> Future[None]:
        """Report the first failure of a kind in this process, for people."""
        return then(
            self._submit(
                "first_failure",
                reason=reason,
                detail=detail,
                location=location,
                traceback=traceback,
            ),
            ignore_answer,
        )

    def down(self, group: str, incarnation: int) -> Future[None]:
        """Report that a supervisor saw this incarnation of ``group`` end."""
        return then(self._submit("down", group=group, incarnation=incarnation), ignore_answer)
