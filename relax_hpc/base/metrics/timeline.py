"""The workers of a run over time: whole seconds by label, the steps that were trained, and the pace
of both sides."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from relax_hpc.base.metrics.accounting import (
    IDLE,
    UNFINISHED,
    Interval,
    Label,
    Stretch,
    seconds_by_label,
    sum_by_label,
    uncovered_intervals,
)
from relax_hpc.base.metrics.read_spans import Process, Span, merge_intervals

USEFUL = ("generate", "train", "forward", "eval", "queue")
"""Work that a new incarnation of a group goes on with; to load or to publish old weights is
none."""


@dataclass(frozen=True)
class WorkerTimeline:
    """A rank of a role, or one of the engines of a rank, from the start of its process to its
    end."""

    group: str
    incarnation: int
    role: str
    began: float
    ended: float
    spans: Sequence[Span]
    ended_cleanly: bool
    """Whether it said itself when it ended; if not, its work after its last span is not known."""

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Spans of the worker, and the rest that none tells of."""
        found = [
            (Label(span.what, span.peer, span.reason), span.start, span.end) for span in self.spans
        ]
        if not found:
            return [(Label("start"), self.began, self.ended)]
        last = max(end for _, _, end in found)
        return found if self.ended_cleanly else [*found, (Label(UNFINISHED), last, self.ended)]

    @cached_property
    def busy(self) -> list[Interval]:
        """Intervals in which it worked, merged."""
        return merge_intervals(
            (start, end) for label, start, end in self.stretches if label.what not in IDLE
        )

    def seconds_alive(self, start: float, end: float) -> float:
        """Seconds of its life in [start, end]."""
        return max(0.0, min(end, self.ended) - max(start, self.began))

    def seconds(
        self, start: float, end: float, holes: Iterable[Interval] = ()
    ) -> dict[Label, float]:
        """Seconds of its life in [start, end], but for ``holes``, by label; each one once."""
        parts = uncovered_intervals((max(start, self.began), min(end, self.ended)), holes)
        return sum_by_label(seconds_by_label(self.stretches, low, high) for low, high in parts)

    def useful_interval(self) -> Interval | None:
        """The start of its first work that helps the run, and the end of its last."""
        spans = [span for span in self.spans if span.what in USEFUL]
        return (
            (min(span.start for span in spans), max(span.end for span in spans)) if spans else None
        )


def workers_of_process(process: Process, ended: float) -> list[WorkerTimeline]:
    """The workers of a process, which ended, if it does not say so itself, at ``ended``."""
    about = (process.group, process.incarnation, process.role, process.began)
    end = max(process.last, ended if process.ended is None else process.ended)
    return [
        WorkerTimeline(*about, end, spans, process.ended is not None) for spans in process.workers()
    ]


def step_ends(workers: Iterable[WorkerTimeline]) -> dict[int, float]:
    """Time at which each step was trained, the last time that it was, in ascending order of
    steps."""
    ends: dict[int, float] = {}
    for _, span in _training(workers):
        if span.step is not None:
            ends[span.step] = max(span.end, ends.get(span.step, -math.inf))
    return dict(sorted(ends.items()))


def find_repeated_training(workers: Iterable[WorkerTimeline]) -> list[tuple[WorkerTimeline, Span]]:
    """Training whose step a later incarnation of the actor had to train once more."""
    trained = [
        (worker, span, span.step) for worker, span in _training(workers) if span.step is not None
    ]
    newest: dict[int, int] = {}
    for worker, _, step in trained:
        newest[step] = max(worker.incarnation, newest.get(step, 0))
    return [(worker, span) for worker, span, step in trained if worker.incarnation < newest[step]]


def _training(workers: Iterable[WorkerTimeline]) -> Iterator[tuple[WorkerTimeline, Span]]:
    actors = (worker for worker in workers if worker.role == "actor")
    return ((worker, span) for worker in actors for span in worker.spans if span.what == "train")


@dataclass(frozen=True, slots=True)
class Pace:
    """Medians over `steps` steps, seconds: a step, and how long of it each side is busy."""

    steps: int
    step_s: float
    rollout_s: float
    actor_s: float

    @property
    def overlap(self) -> float:
        """Overlap of the two sides; 1: a step takes no longer than the busier one."""
        return max(self.rollout_s, self.actor_s) / self.step_s


def measure_pace(workers: Sequence[WorkerTimeline], ends: dict[int, float]) -> Pace | None:
    """The pace of the steps in ``ends`` whose step before is there too and ended before; None
    without any.

    Busy is the mean over the workers of a role that live at the time.
    """
    windows = [(ends[step - 1], end) for step, end in ends.items() if ends.get(step - 1, end) < end]
    if not windows:
        return None
    rollout, actor = (
        [worker for worker in workers if worker.role == role] for role in ("rollout", "actor")
    )
    sides = [median(_busy(side, start, end) for start, end in windows) for side in (rollout, actor)]
    return Pace(len(windows), median(end - start for start, end in windows), *sides)


def _busy(workers: Iterable[WorkerTimeline], start: float, end: float) -> float:
    """Seconds of [start, end] in which ``workers`` were busy, on average."""
    lives = [(worker, lived) for worker in workers if (lived := worker.seconds_alive(start, end))]
    whole = sum(lived for _, lived in lives)
    return (
        (end - start) * sum(_covered(worker.busy, start, end) for worker, _ in lives) / whole
        if whole
        else 0.0
    )


def _covered(merged: Sequence[Interval], start: float, end: float) -> float:
    """Seconds of [start, end] that disjoint ascending intervals cover."""
    total = 0.0
    for low, high in merged[max(0, bisect_right(merged, (start, math.inf)) - 1) :]:
        if low >= end:
            break
        total += max(0.0, min(high, end) - max(low, start))
    return total
