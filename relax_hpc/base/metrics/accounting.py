"""Accounts of time: each second of a worker has exactly one label. This module only computes."""

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
    "start",
    "wait",
)
"""Kinds by priority. Where spans overlap, a second belongs to the first of their kinds. An engine
that is being updated, for example, does not generate."""
OTHER, UNFINISHED = "other", "unfinished"
"""Kinds of the time between spans, and of the time after the last span of a process that was
killed."""
IDLE = ("wait", "start", OTHER, UNFINISHED)
"""Kinds that are not work."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, order=True)
class Label:
    """Label of a second: its kind (`what`), and for a wait also the awaited `peer` and the
    reason."""

    what: str
    peer: str = ""
    reason: str = ""


class Account:
    """Seconds of one worker by label, from the begins and ends of its spans. Times never decrease.

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

    def move(self, label: Label, targets: Mapping[Label, float]) -> None:
        """Move seconds from ``label`` to ``targets``, the given number to each.

        If ``label`` has fewer seconds, each target receives its share of them. If it has more, the
        difference stays.
        """
        wanted = sum(targets.values())
        if not wanted:
            return
        moved = min(wanted, self._seconds[label])
        self._seconds[label] -= moved
        for target, seconds in targets.items():
            self._seconds[target] += moved * seconds / wanted

    def take(self, now: float) -> dict[Label, float]:
        """Seconds by label since the last call. Their sum is the time that has passed."""
        self._settle(now)
        taken, self._seconds = self._seconds, defaultdict(float)
        return {label: seconds for label, seconds in taken.items() if seconds}

    def _settle(self, now: float) -> None:
        label = min(self._running, key=rank_of, default=Label(OTHER))
        self._seconds[label] += max(0.0, now - self._at)
        self._at = max(now, self._at)


def uncovered_intervals(interval: Interval, holes: Iterable[Interval]) -> Iterator[Interval]:
    """The pieces of ``interval`` that no hole covers, in ascending order."""
    at, end = interval
    for low, high in sorted(hole for hole in holes if hole[1] > hole[0]):
        if min(low, end) > at:
            yield at, min(low, end)
        at = max(at, high)
    if end > at:
        yield at, end


def sum_by_label(accounts: Iterable[Mapping[Label, float]]) -> dict[Label, float]:
    """Sums of ``accounts`` by label."""
    total: dict[Label, float] = defaultdict(float)
    for account in accounts:
        for label, seconds in account.items():
            total[label] += seconds
    return dict(total)


def work_seconds(seconds: Mapping[Label, float]) -> float:
    """Seconds of work among ``seconds``."""
    return sum(spent for label, spent in seconds.items() if label.what not in IDLE)


def even_split(rollout_s: float, actor_s: float, rollout: int, actor: int) -> tuple[int, int]:
    """Division of ``rollout`` + ``actor`` units that minimises the longer busy time of a step.

    Work is assumed to scale linearly: twice the units need half the time. Each side has at least
    one unit.

    >>> even_split(rollout_s=30.0, actor_s=10.0, rollout=4, actor=4)
    (6, 2)
    """
    total = rollout + actor
    best = min(
        range(1, total), key=lambda n: max(rollout_s * rollout / n, actor_s * actor / (total - n))
    )
    return best, total - best


def rank_of(label: Label) -> int:
    """Position of a label in `PRIORITY`."""
    return PRIORITY.index(label.what) if label.what in PRIORITY else len(PRIORITY)
