"""Time put down once: every second of a worker belongs to one label, and what follows from that.
Pure arithmetic."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

PRIORITY = (
    "engine_update",
    "generate",
    "train",
    "forward",
    "eval",
    "publish",
    "checkpoint",
    "weights",
    "queue",
)
PRIORITY += ("start", "wait")
"""Kinds by priority: where they overlap a second belongs to the first, so an engine that is updated
does not generate."""
OTHER, UNFINISHED = "other", "unfinished"
"""Kinds of the time between spans, and after the last span of a process that left no word of its
end: one that it never finished."""
IDLE = ("wait", "start", OTHER, UNFINISHED)
"""Kinds that are no work."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, order=True)
class Label:
    """Label of a second by what it was spent on; a wait also says for which `peer`, and why."""

    what: str
    peer: str = ""
    reason: str = ""


Stretch = tuple[Label, float, float]
"""Label, and its beginning and end, seconds."""


class Account:
    """One worker's seconds by label, as it begins and ends what it is at. Times never decrease.

    >>> account = Account(0.0)
    >>> account.begin(Label("wait"), 1.0)
    >>> account.begin(Label("train"), 3.0)
    >>> account.end(Label("train"), 7.0)
    >>> {label.what: seconds for label, seconds in account.take(8.0).items()}
    {'other': 1.0, 'wait': 3.0, 'train': 4.0}
    """

    def __init__(self, start: float) -> None:
        self._at = start
        self._running: Counter[Label] = Counter()
        self._seconds: dict[Label, float] = defaultdict(float)

    def begin(self, label: Label, now: float) -> None:
        self._settle(now)
        self._running[label] += 1

    def end(self, label: Label, now: float) -> None:
        self._settle(now)
        self._running[label] -= 1
        if not self._running[label]:
            del self._running[label]

    def move(self, label: Label, others: Mapping[Label, float]) -> None:
        """Move seconds from ``label`` to ``others``, for so many seconds each, or as many of them
        as there are.

        Seconds of ``label`` beyond theirs stay.
        """
        wanted = sum(others.values())
        moved = min(wanted, self._seconds[label])
        self._seconds[label] -= moved
        for other, seconds in others.items() if wanted else ():
            self._seconds[other] += moved * seconds / wanted

    def take(self, now: float) -> dict[Label, float]:
        """Seconds by label since the last take; they add up to the time that has passed."""
        self._settle(now)
        taken, self._seconds = self._seconds, defaultdict(float)
        return {label: seconds for label, seconds in taken.items() if seconds}

    def _settle(self, now: float) -> None:
        label = min(self._running, key=_rank, default=Label(OTHER))
        self._seconds[label] += max(0.0, now - self._at)
        self._at = max(now, self._at)


def seconds_by_label(stretches: Iterable[Stretch], start: float, end: float) -> dict[Label, float]:
    """The seconds of [start, end] by label: those that no stretch covers are OTHER's."""
    edges: list[tuple[float, bool, Label]] = []
    for label, low, high in stretches:
        low, high = max(low, start), min(high, end)
        if high > low:
            edges += [(low, True, label), (high, False, label)]
    account = Account(start)
    for at, begins, label in sorted(edges):
        (account.begin if begins else account.end)(label, at)
    return account.take(max(start, end))


def uncovered_intervals(interval: Interval, holes: Iterable[Interval]) -> Iterator[Interval]:
    """The parts of ``interval`` that no hole covers, ascending."""
    at, end = interval
    for low, high in sorted(hole for hole in holes if hole[1] > hole[0]):
        if min(low, end) > at:
            yield at, min(low, end)
        at = max(at, high)
    if end > at:
        yield at, end


def sum_by_label(parts: Iterable[Mapping[Label, float]]) -> dict[Label, float]:
    """Sums of ``parts`` by label."""
    total: dict[Label, float] = defaultdict(float)
    for part in parts:
        for label, seconds in part.items():
            total[label] += seconds
    return dict(total)


def work_seconds(seconds: Mapping[Label, float]) -> float:
    """Seconds of work among ``seconds``."""
    return sum(spent for label, spent in seconds.items() if label.what not in IDLE)


def even_split(rollout_s: float, actor_s: float, rollout: int, actor: int) -> tuple[int, int]:
    """Division of ``rollout`` + ``actor`` units by which the busy time of a step is as even as it
    can be.

    Work is taken to scale linearly: twice the units do it in half the time. At least one unit is on
    either side.

    >>> even_split(rollout_s=30.0, actor_s=10.0, rollout=4, actor=4)
    (6, 2)
    """
    total = rollout + actor
    best = min(
        range(1, total), key=lambda n: max(rollout_s * rollout / n, actor_s * actor / (total - n))
    )
    return best, total - best


def _rank(label: Label) -> int:
    return PRIORITY.index(label.what) if label.what in PRIORITY else len(PRIORITY)
