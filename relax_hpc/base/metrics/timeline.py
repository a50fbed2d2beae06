"""Time of the workers of a run: seconds by label, end times of steps, and busy time of both
sides."""

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
"""Kinds of work that advance the run. Loading, and publishing old weights again, do not."""


@dataclass(frozen=True)
class WorkerTimeline:
    """A rank of a role, or one engine of a rank, from the start of its process to its end."""

    group: str
    incarnation: int
    role: str
    began: float
    ended: float
    spans: Sequence[Span]
    ended_cleanly: bool
    """Whether it wrote the time of its end. If not, its work after its last span is unknown."""

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Spans of the worker, and the time after its last span if it did not end cleanly."""
        stretches = [
            (Label(span.what, span.peer, span.reason), span.start, span.end) for span in self.spans
        ]
        if not stretches:
            return [(Label("start"), self.began, self.ended)]
        if not self.ended_cleanly:
            last = max(end for _, _, end in stretches)
            stretches.append((Label(UNFINISHED), last, self.ended))
        return stretches

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
        """Seconds of its life in [start, end], without ``holes``, by label. Each second counts
        once."""
        intervals = uncovered_intervals((max(start, self.began), min(end, self.ended)), holes)
        return sum_by_label(seconds_by_label(self.stretches, low, high) for low, high in intervals)

    def useful_interval(self) -> Interval | None:
        """Begin of its first span of useful work, and end of its last one. None: there is none."""
        spans = [span for span in self.spans if span.what in USEFUL]
        if not spans:
            return None
        return min(span.start for span in spans), max(span.end for span in spans)


def workers_of_process(process: Process, ended: float) -> list[WorkerTimeline]:
    """The workers of a process. ``ended``: end of the process, if it has not written it."""
    end = max(process.last, ended if process.ended is None else process.ended)
    return [
        WorkerTimeline(
            process.group,
            process.incarnation,
            process.role,
            process.began,
            end,
            spans,
            process.ended is not None,
        )
        for spans in process.workers()
    ]


def step_ends(workers: Iterable[WorkerTimeline]) -> dict[int, float]:
    """End of the last training of each step, in ascending order of steps."""
    ends: dict[int, float] = {}
    for _, span in _training(workers):
        if span.step is not None:
            ends[span.step] = max(span.end, ends.get(span.step, -math.inf))
    return dict(sorted(ends.items()))


def find_repeated_training(workers: Iterable[WorkerTimeline]) -> list[tuple[WorkerTimeline, Span]]:
    """Spans of training whose step a later incarnation of the actor has trained again."""
    trained = [
        (worker, span, span.step) for worker, span in _training(workers) if span.step is not None
    ]
    newest: dict[int, int] = {}
    for worker, _, step in trained:
        newest[step] = max(worker.incarnation, newest.get(step, 0))
    return [(worker, span) for worker, span, step in trained if worker.incarnation < newest[step]]


def _training(workers: Iterable[WorkerTimeline]) -> Iterator[tuple[WorkerTimeline, Span]]:
    for worker in workers:
        if worker.role == "actor":
            yield from ((worker, span) for span in worker.spans if span.what == "train")


@dataclass(frozen=True, slots=True)
class Pace:
    """Medians over `steps` steps, in seconds: length of a step, and busy time of each side."""

    steps: int
    step_s: float
    rollout_s: float
    actor_s: float

    @property
    def overlap(self) -> float:
        """Busy time of the busier side, as a share of the step. 1: complete overlap."""
        return max(self.rollout_s, self.actor_s) / self.step_s


def measure_pace(workers: Sequence[WorkerTimeline], ends: dict[int, float]) -> Pace | None:
    """The pace of the steps in ``ends`` that follow directly on another step. None: there are none.

    The busy time is the mean over the workers of a role that run in the step.
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
    """Mean seconds of [start, end] in which ``workers`` were busy."""
    seconds_busy = seconds_alive = 0.0
    for worker in workers:
        if seconds := worker.seconds_alive(start, end):
            seconds_alive += seconds
            seconds_busy += _covered(worker.busy, start, end)
    return (end - start) * seconds_busy / seconds_alive if seconds_alive else 0.0


def _covered(merged: Sequence[Interval], start: float, end: float) -> float:
    """Seconds of [start, end] that disjoint ascending intervals cover."""
    total = 0.0
    for low, high in merged[max(0, bisect_right(merged, (start, math.inf)) - 1) :]:
        if low >= end:
            break
        total += max(0.0, min(high, end) - max(low, start))
    return total
