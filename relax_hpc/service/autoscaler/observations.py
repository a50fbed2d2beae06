"""Observations of the autoscaler: samples of the live state of a run, summed over windows."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_NOW_SHARE = 1 / 3
"""Share of the short window that counts as now."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Live state of a run at one moment."""

    time_s: float
    """Wall-clock time in seconds."""
    serving: int
    """Engines that serve."""
    generating: int
    """Prompt groups in generation."""
    slots: int
    """Prompt groups that one engine may have in generation."""
    trainer_waits: bool
    """Whether the trainer waits for rows."""
    accepted_groups: float
    """Prompt groups that were accepted since the begin of the run."""
    trained_steps: int
    """Training steps since the begin of the run."""

    @property
    def busy_engines(self) -> float:
        """Engines in use, by their slots; at most ``serving``."""
        return min(float(self.serving), self.generating / self.slots)


@dataclass(frozen=True, slots=True)
class Facts:
    """Values of a run that are not averaged. None: unknown."""

    starting: int = 0
    """Engines that are requested and do not serve yet."""
    ready_groups: int = 0
    """Prompt groups that wait for training."""
    step_groups: int = 1
    """Prompt groups of a training step."""
    oldest_generation_s: float = 0.0
    """Age of the oldest prompt group in generation."""
    kv_use: float | None = None
    """Mean share of the engines' KV caches in use."""
    start_s: float | None = None
    """Median of the last start times of engines."""
    expected_start_s: float | None = None
    """Seconds until Slurm expects to start the last pending engine."""
    idle_nodes: int | None = None
    """Idle nodes that the rollout's jobs may use."""
    nodes_per_engine: float = 1.0
    job_time_left_s: float | None = None
    """Seconds until the time limit of the run's job."""
    node_hours_used: float = 0.0
    """Node-hours of all rollout engines since the begin of the run."""
    open_operation: str = ""
    """An operation that is not final yet, with its state."""


@dataclass(frozen=True, slots=True)
class Window:
    """Sums over some seconds."""

    covered_s: float
    """Seconds that samples cover."""
    trainer_wait: float
    """Share of the time for which the trainer waited for rows."""
    engine_wait: float
    """Share of the engines' time for which they waited for tickets."""
    accepted_groups: float
    group_engine_s: float | None
    """Seconds of one engine that a prompt group takes; None: no group was accepted."""
    group_s: float
    """Seconds of a prompt group in generation (Little's law); infinity: none was accepted."""


@dataclass(frozen=True, slots=True)
class Observations:
    """Observations on which a decision depends."""

    time_s: float
    """Wall-clock time in seconds."""
    serving: int
    """Engines that serve."""
    wanted_s: float
    """Seconds that the short window should cover."""
    now: Window
    """The last third of the short window."""
    short: Window
    long: Window
    """Window of the cool-down of a removal."""
    trainer_groups_per_s: float | None
    """Prompt groups per second that the trainer takes while it has rows; None before a step."""
    facts: Facts

    @property
    def engines(self) -> int:
        """Engines that serve or start."""
        return self.serving + self.facts.starting

    def need(self, window: Window) -> float | None:
        """Number of engines with which neither side would wait; None: unknown."""
        if window.group_engine_s is None or self.trainer_groups_per_s is None:
            return None
        return window.group_engine_s * self.trainer_groups_per_s


class ObservationLog:
    """Samples of the last ``keep_s`` seconds.

    After a gap of ``max_gap_s`` without a sample, or when a run resumes at an earlier step, the
    samples before are dropped.
    """

    def __init__(self, keep_s: float = 7200.0, max_gap_s: float = 15.0) -> None:
        self.keep_s, self.max_gap_s = keep_s, max_gap_s
        self._samples: deque[Sample] = deque()
        self._step_s: deque[float] = deque(maxlen=5)
        """Seconds that the trainer worked on each of the last steps."""
        self._worked_s: float | None = None
        """Seconds that the trainer has worked on the present step; None: its begin was not
        seen."""

    def add(self, sample: Sample) -> None:
        """Add the newest sample."""
        previous = self._samples[-1] if self._samples else None
        steps = sample.trained_steps - previous.trained_steps if previous else 0
        if previous and (sample.time_s - previous.time_s > self.max_gap_s or steps < 0):
            self._samples.clear()
            previous = None
        if previous is None:
            self._worked_s = 0.0 if sample.trainer_waits else None
        else:
            worked_s = 0.0 if previous.trainer_waits else sample.time_s - previous.time_s
            self._count_work(steps, worked_s)
        self._samples.append(sample)
        while self._samples[0].time_s < sample.time_s - self.keep_s:
            self._samples.popleft()

    def _count_work(self, steps: int, worked_s: float) -> None:
        if self._worked_s is not None:
            self._worked_s += worked_s
            if steps:
                self._step_s.append(self._worked_s / steps)
        if steps:
            self._worked_s = 0.0

    @property
    def is_empty(self) -> bool:
        return not self._samples

    @property
    def step_s(self) -> float | None:
        """Median of the seconds that the trainer works on a step; None: no step was seen."""
        return statistics.median(self._step_s) if self._step_s else None

    def observe(self, facts: Facts, window_s: float, cooldown_s: float) -> Observations:
        """Sums over windows that are as long as ``window_s``, two steps and the generation of two
        prompt groups; and at least ``cooldown_s`` for the long one."""
        step_s = self.step_s
        short_s = max(window_s, 2 * (step_s or 0.0))
        group_s = self._sum(short_s).group_s
        short_s = max(short_s, 2 * group_s if math.isfinite(group_s) else 0.0)
        return Observations(
            time_s=self._samples[-1].time_s,
            serving=self._samples[-1].serving,
            wanted_s=short_s,
            now=self._sum(short_s * _NOW_SHARE),
            short=self._sum(short_s),
            long=self._sum(max(2 * short_s, cooldown_s)),
            trainer_groups_per_s=facts.step_groups / step_s if step_s else None,
            facts=facts,
        )

    def _sum(self, seconds: float) -> Window:
        begin_s = self._samples[-1].time_s - seconds
        samples = [sample for sample in self._samples if sample.time_s >= begin_s]
        covered_s = samples[-1].time_s - samples[0].time_s
        accepted = samples[-1].accepted_groups - samples[0].accepted_groups
        busy_s, engine_s = _integrate(samples, "busy_engines"), _integrate(samples, "serving")
        generating_s = _integrate(samples, "generating")
        return Window(
            covered_s=covered_s,
            trainer_wait=_integrate(samples, "trainer_waits") / covered_s if covered_s else 0.0,
            engine_wait=1.0 - busy_s / engine_s if engine_s else 0.0,
            accepted_groups=accepted,
            group_engine_s=busy_s / accepted if accepted > 0 else None,
            group_s=generating_s / accepted if accepted > 0 else math.inf,
        )


def _integrate(samples: Sequence[Sample], name: str) -> float:
    """The value ``name`` of each sample times the seconds until the next one."""
    return sum(
        float(getattr(earlier, name)) * (later.time_s - earlier.time_s)
        for earlier, later in pairwise(samples)
    )
