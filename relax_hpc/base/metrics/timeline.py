"""Time of the workers of a run: seconds by label, end times of steps, and busy time of both
sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from relax_hpc.base.metrics.accounting import (
    IDLE,
    UNFINISHED,
    Interval,
    Label,
    sum_by_label,
    uncovered_intervals,
)
from relax_hpc.base.metrics.read_spans import Process
from relax_hpc.base.metrics.span_table import (
    Floats,
    Integers,
    Merged,
    Span,
    SpanTable,
    seconds_by_label,
)

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
    def table(self) -> SpanTable:
        return SpanTable.from_spans(self.spans)

    @cached_property
    def _stretches(self) -> tuple[list[Label], Integers, Floats, Floats]:
        """Distinct labels, and of each stretch the index of its label, its begin and its end.

        Stretches are the spans of the worker, and the time after its last span if it did not end
        cleanly.
        """
        labels, label = self.table.labels
        starts, ends = self.table.start, self.table.end
        last: tuple[Label, float] | None = None
        if not len(starts):
            last = Label("start"), self.began
        elif not self.ended_cleanly:
            last = Label(UNFINISHED), float(ends.max())
        if last:
            labels = [*labels, last[0]]
            label = np.append(label, len(labels) - 1)
            starts, ends = np.append(starts, last[1]), np.append(ends, self.ended)
        return labels, label, starts, ends

    @cached_property
    def busy(self) -> Merged:
        """Intervals in which it worked."""
        labels, label, starts, ends = self._stretches
        is_work = np.array([one.what not in IDLE for one in labels], np.bool_)[label]
        return Merged.from_intervals(starts[is_work], ends[is_work])

    def seconds_alive(self, start: float, end: float) -> float:
        """Seconds of its life in [start, end]."""
        return max(0.0, min(end, self.ended) - max(start, self.began))

    def seconds(
        self, start: float, end: float, holes: Iterable[Interval] = ()
    ) -> dict[Label, float]:
        """Seconds of its life in [start, end], without ``holes``, by label. Each second counts
        once."""
        intervals = uncovered_intervals((max(start, self.began), min(end, self.ended)), holes)
        return sum_by_label(map(self._seconds_of, intervals))

    def _seconds_of(self, interval: Interval) -> dict[Label, float]:
        """Seconds of a part of its life by label. A report asks for its whole life several
        times."""
        if interval not in self._known_seconds:
            self._known_seconds[interval] = seconds_by_label(*self._stretches, interval)
        return self._known_seconds[interval]

    @cached_property
    def _known_seconds(self) -> dict[Interval, dict[Label, float]]:
        return {}

    def useful_interval(self) -> Interval | None:
        """Begin of its first span of useful work, and end of its last one. None: there is none."""
        spans = self.table.of_kinds(USEFUL)
        if not len(spans):
            return None
        return float(spans.start.min()), float(spans.end.max())


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
    for _, spans in _training(workers):
        for step, end in zip(spans.step.tolist(), spans.end.tolist(), strict=True):
            ends[step] = max(end, ends.get(step, -math.inf))
    return dict(sorted(ends.items()))


def find_repeated_training(workers: Iterable[WorkerTimeline]) -> list[tuple[WorkerTimeline, Span]]:
    """Spans of training whose step a later incarnation of the actor has trained again."""
    trained = list(_training(workers))
    newest: dict[int, int] = {}
    for worker, spans in trained:
        for step in np.unique(spans.step).tolist():
            newest[step] = max(worker.incarnation, newest.get(step, 0))
    repeated = list[tuple[WorkerTimeline, Span]]()
    for worker, spans in trained:
        for number, step in enumerate(spans.step.tolist()):
            if worker.incarnation < newest[step]:
                repeated.append((worker, spans[number]))
    return repeated


def _training(workers: Iterable[WorkerTimeline]) -> Iterator[tuple[WorkerTimeline, SpanTable]]:
    """Workers of the actor, and their spans of training that belong to a step."""
    for worker in workers:
        if worker.role == "actor":
            yield worker, worker.table.of_kinds(["train"]).with_step()


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
    starts, finishes = np.array(windows, np.float64).T
    sides = [float(np.median(_busy(side, starts, finishes))) for side in (rollout, actor)]
    return Pace(len(windows), float(np.median(finishes - starts)), *sides)


def _busy(workers: Iterable[WorkerTimeline], starts: Floats, ends: Floats) -> Floats:
    """Mean seconds of each interval [starts, ends] in which ``workers`` were busy."""
    busy_s, alive_s = np.zeros(len(starts)), np.zeros(len(starts))
    for worker in workers:
        alive = np.minimum(ends, worker.ended) - np.maximum(starts, worker.began)
        is_alive = alive > 0
        alive_s += np.where(is_alive, alive, 0.0)
        busy_s += np.where(is_alive, worker.busy.covered(starts, ends), 0.0)
    share = np.divide(busy_s, alive_s, out=np.zeros(len(starts)), where=alive_s > 0)
    return (ends - starts) * share
