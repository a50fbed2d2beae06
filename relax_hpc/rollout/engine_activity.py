"""The time of an engine, of which several requests are in flight at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from relax_hpc.base.metrics.spans import Spans

_TICKETS = ("actor", "tickets")
"""Cause of an engine's wait where no other is told: versions and room in the queue come from
there."""
_ENVIRONMENTS = ("environments", "step")
"""Cause of the wait of an engine all of whose episodes are with their environments."""


class Activity:
    """Activity of an engine, as spans: several requests at once count once, and only an engine
    without any work waits.

    Make it when the engine has started. ``lane``: its own among those of the process.
    """

    def __init__(self, spans: Spans, lane: str = "") -> None:
        self._spans, self._lane = spans, lane
        self._running: Counter[str] = Counter()
        self._open: dict[str, ExitStack] = {}
        self._playing = 0
        """Episodes that are played against environments."""
        self._begin("wait", None)

    def because(self, waited: Iterable[Sequence]) -> None:
        """Name ``waited`` as the causes of the wait so far, if it waits; see `OpenSpan.because`."""
        if "wait" in self._open and not self._playing:
            self._waiting.set_causes(waited)

    @contextmanager
    def playing(self) -> Iterator[None]:
        """An episode against an environment, for which the engine waits where it has no other
        work."""
        self._play(1)
        try:
            yield
        finally:
            self._play(-1)

    def _play(self, change: int) -> None:
        before, self._playing = self._playing, self._playing + change
        if "wait" in self._open and bool(before) != bool(self._playing):
            self._end("wait")
            self._begin("wait", None)

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
        cause = ("", "")
        if what == "wait":
            cause = _ENVIRONMENTS if self._playing else _TICKETS
        span = self._open[what].enter_context(self._spans(what, step, self._lane, cause))
        if what == "wait":
            self._waiting = span

    def _end(self, what: str) -> None:
        self._open.pop(what).close()
