"""The time of an engine, of which several requests are in flight at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from relax_hpc.metrics.spans import Spans

_TICKETS = ("actor", "tickets")
"""Cause of an engine's wait where no other is told: versions and room in the queue come from there."""


class Activity:
    """Activity of an engine, as spans: several requests at once count once, and only an engine without any work waits.

    Make it when the engine has started. ``lane``: its own among those of the process.
    """

    def __init__(self, spans: Spans, lane: str = "") -> None:
        self._spans, self._lane = spans, lane
        self._running: Counter[str] = Counter()
        self._open: dict[str, ExitStack] = {}
        self._begin("wait", None)

    def because(self, waited: Iterable[Sequence]) -> None:
        """Name ``waited`` as the causes of the wait so far, if it waits; see `OpenSpan.because`."""
        if "wait" in self._open:
            self._waiting.because(waited)

    @contextmanager
    def __call__(self, what: str, step: int | None) -> Iterator[None]:
        """Work of a kind, from its first overlapping request to the end of its last."""
        if not self._running.total():
            self._end("wait")
        if not self._running[what]:
            self._begin(what, step)
        self._running[what] += 1
        try:
            yield
        finally:
            self._running[what] -= 1
            if not self._running[what]:
                self._end(what)
            if not self._running.total():
                self._begin("wait", None)

    def _begin(self, what: str, step: int | None) -> None:
        self._open[what] = ExitStack()
        cause = _TICKETS if what == "wait" else ("", "")
        span = self._open[what].enter_context(self._spans(what, step, self._lane, cause))
        if what == "wait":
            self._waiting = span

    def _end(self, what: str) -> None:
        self._open.pop(what).close()
