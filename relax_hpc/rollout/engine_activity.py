"""Spans of the activity of an engine, which has several requests in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from relax_hpc.base.metrics.spans import Spans

_TICKETS = ("actor", "tickets")
"""Default cause of an engine's wait: tickets need versions of the actor and space in the queue."""
_ENVIRONMENTS = ("environments", "step")
"""Cause of the wait of an engine while all of its episodes wait for their environments."""


class Activity:
    """Activity of an engine as spans. Overlapping requests of a kind are one span. The engine waits
    if it has no request at all.

    Create it when the engine has started. ``lane``: name of the engine's lane among those of the
    process.
    """

    def __init__(self, spans: Spans, lane: str = "") -> None:
        self._spans, self._lane = spans, lane
        self._running: Counter[str] = Counter()
        self._open: dict[str, ExitStack] = {}
        self._playing = 0
        """Episodes that are played against environments."""
        self._begin("wait", None)

    def set_wait_causes(self, waited: Iterable[Sequence]) -> None:
        """Set the causes of the present wait, if the engine waits; see `OpenSpan.set_causes`."""
        if "wait" in self._open and not self._playing:
            self._waiting.set_causes(waited)

    @contextmanager
    def playing(self) -> Iterator[None]:
        """An episode against an environment. A wait of the engine during the block has the cause
        `_ENVIRONMENTS`."""
        self._change_playing(1)
        try:
            yield
        finally:
            self._change_playing(-1)

    def _change_playing(self, change: int) -> None:
        before, self._playing = self._playing, self._playing + change
        if "wait" in self._open and bool(before) != bool(self._playing):
            self._end("wait")
            self._begin("wait", None)

    @contextmanager
    def __call__(self, kind: str, step: int | None) -> Iterator[None]:
        """Work of a ``kind`` for ``step``. The span lasts from the first to the last of overlapping
        blocks."""
        if not self._running.total():
            self._end("wait")
        if not self._running[kind]:
            self._begin(kind, step)
        self._running[kind] += 1
        try:
            yield
        finally:
            self._running[kind] -= 1
            if not self._running[kind]:
                self._end(kind)
            if not self._running.total():
                self._begin("wait", None)

    def _begin(self, kind: str, step: int | None) -> None:
        self._open[kind] = ExitStack()
        cause = ("", "")
        if kind == "wait":
            cause = _ENVIRONMENTS if self._playing else _TICKETS
        span = self._open[kind].enter_context(self._spans(kind, step, self._lane, cause))
        if kind == "wait":
            self._waiting = span

    def _end(self, kind: str) -> None:
        self._open.pop(kind).close()
