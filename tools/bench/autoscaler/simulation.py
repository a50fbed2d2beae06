"""An asynchronous run in simulated time: engines with slots, a trainer, tickets with a bound on
staleness, and engines that start after a wait in Slurm's queue.

Prompt groups are generated one by one. A group occupies a slot for its own number of seconds, which
is drawn when it begins. A step takes the finished groups whose last possible step is nearest, and
waits for a group in generation whose last possible step it is. Groups of a removed engine continue
on another one, as they do in a run.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from relax_hpc.service.autoscaler.observations import Facts, ObservationLog, Sample

TICK_S = 1.0
SAMPLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A load over time, and the run that has it."""

    name: str
    load: Callable[[float], float]
    """Time in seconds -> generation work of a prompt group, relative to 1."""
    seconds: float = 7200.0
    step_groups: int = 32
    step_s: float = 20.0
    """Seconds of the trainer for a step."""
    step_grows: float = 0.0
    """Power of the load with which the seconds of a step grow."""
    engine_groups_per_s: float = 0.4
    """Prompt groups per second of one engine at a load of 1."""
    slots: int = 4
    spread: float = 0.3
    """Sigma of the logarithm of a group's seconds (lognormal)."""
    staleness: int = 2
    first_engines: int = 2
    max_engines: int = 16
    load_s: float = 15.0
    """Seconds from the start of an engine's job to its first ticket."""
    queue_s: float = 45.0
    """Mean of the seconds in Slurm's queue (exponential)."""
    queue_tail: float = 0.0
    """Share of the jobs that wait ten times as long."""

    @property
    def start_s(self) -> float:
        """Mean start time."""
        return self.load_s + self.queue_s * (1 + 9 * self.queue_tail)

    def need(self, time_s: float) -> float:
        """Engines with which generation is as fast as training."""
        load = self.load(time_s)
        train_s = self.step_s * load**self.step_grows
        return self.step_groups / train_s * load / self.engine_groups_per_s


@dataclass(slots=True)
class Engine:
    """An engine from its request to its end."""

    begins_s: float
    """Time at which its job starts."""
    serves_s: float
    """Time from which it serves."""


@dataclass(slots=True)
class Result:
    """What a simulated run achieved."""

    steps: int = 0
    node_hours: float = 0.0
    trainer_wait: float = 0.0
    """Share of the time for which the trainer waited."""
    changes: int = 0
    """Changes of the number of engines."""

    @property
    def steps_per_node_hour(self) -> float:
        return self.steps / self.node_hours


Controller = Callable[[float, ObservationLog, Facts], int]
"""(time, log, facts) -> wanted number of engines."""


class Simulation:
    """One simulated run."""

    def __init__(self, shape: Shape, control: Controller, seed: int, every_s: float = 10.0) -> None:
        self.shape, self.control, self.every_s = shape, control, every_s
        self.random = random.Random(seed)
        self.log, self.result = ObservationLog(), Result()
        self.engines = [Engine(0.0, 0.0) for _ in range(shape.first_engines)]
        self.time_s = 0.0
        self.generating: list[tuple[float, int, float]] = []
        """Heap of (end, last possible step, begin) of groups in generation."""
        self.interrupted: list[tuple[float, int]] = []
        """(remaining seconds, last possible step) of groups whose engine was removed."""
        self.finished: list[int] = []
        """Heap of the last possible steps of finished groups."""
        self.admitted = self.accepted = 0
        self.step_ends_s: float | None = None
        self.start_times: list[float] = []

    def run(self) -> Result:
        """Simulate all seconds."""
        ticks = 0
        while self.time_s < self.shape.seconds:
            self.finish_groups()
            self.train()
            self.admit()
            if ticks % int(SAMPLE_S / TICK_S) == 0:
                self.log.add(self.sample())
            if ticks % int(self.every_s / TICK_S) == 0:
                self.apply(self.control(self.time_s, self.log, self.facts()))
            self.count()
            self.time_s += TICK_S
            ticks += 1
        return self.result

    # -- engines -------------------------------------------------------------------------------

    def serving(self) -> int:
        return sum(engine.serves_s <= self.time_s for engine in self.engines)

    def apply(self, target: int) -> None:
        """Request or remove engines; those that do not serve yet are removed first."""
        target = max(1, min(self.shape.max_engines, target))
        if target == len(self.engines):
            return
        self.result.changes += 1
        while len(self.engines) < target:
            self.engines.append(self.request_engine())
        while len(self.engines) > target:
            self.engines.remove(max(self.engines, key=lambda engine: engine.serves_s))
        self.interrupt_groups()

    def request_engine(self) -> Engine:
        tail = 10.0 if self.random.random() < self.shape.queue_tail else 1.0
        queued_s = self.random.expovariate(1 / self.shape.queue_s) * tail
        begins_s = self.time_s + queued_s
        self.start_times.append(queued_s + self.shape.load_s)
        return Engine(begins_s, begins_s + self.shape.load_s)

    def interrupt_groups(self) -> None:
        """Keep the groups that exceed the slots, youngest first, for another engine."""
        room = self.serving() * self.shape.slots
        while len(self.generating) > room:
            youngest = max(self.generating, key=lambda group: group[2])
            self.generating.remove(youngest)
            self.interrupted.append((youngest[0] - self.time_s, youngest[1]))
        heapq.heapify(self.generating)

    # -- generation and training ---------------------------------------------------------------

    def finish_groups(self) -> None:
        while self.generating and self.generating[0][0] <= self.time_s:
            _, last_step, _ = heapq.heappop(self.generating)
            heapq.heappush(self.finished, last_step)
            self.accepted += 1

    def admit(self) -> None:
        shape = self.shape
        free = self.serving() * shape.slots - len(self.generating)
        end = (self.result.steps + shape.staleness + 1) * shape.step_groups
        while free > 0 and (self.interrupted or self.admitted < end):
            if self.interrupted:
                seconds, last_step = self.interrupted.pop(0)
            else:
                seconds, last_step = self.draw_seconds(), self.result.steps + shape.staleness
                self.admitted += 1
            heapq.heappush(self.generating, (self.time_s + seconds, last_step, self.time_s))
            free -= 1

    def draw_seconds(self) -> float:
        shape = self.shape
        mean_s = shape.slots / shape.engine_groups_per_s * shape.load(self.time_s)
        return self.random.lognormvariate(math.log(mean_s) - shape.spread**2 / 2, shape.spread)

    def train(self) -> None:
        if self.step_ends_s is not None and self.step_ends_s <= self.time_s:
            self.result.steps += 1
            self.step_ends_s = None
        if self.step_ends_s is None and self.step_is_ready():
            for _ in range(self.shape.step_groups):
                heapq.heappop(self.finished)
            noise = self.random.lognormvariate(0.0, 0.05)
            grown = self.shape.load(self.time_s) ** self.shape.step_grows
            self.step_ends_s = self.time_s + self.shape.step_s * grown * noise

    def step_is_ready(self) -> bool:
        due = [last for _, last, _ in self.generating if last <= self.result.steps]
        due += [last for _, last in self.interrupted if last <= self.result.steps]
        return len(self.finished) >= self.shape.step_groups and not due

    # -- observation ---------------------------------------------------------------------------

    def sample(self) -> Sample:
        return Sample(
            time_s=self.time_s,
            serving=self.serving(),
            generating=len(self.generating),
            slots=self.shape.slots,
            trainer_waits=self.step_ends_s is None,
            accepted_groups=self.accepted,
            trained_steps=self.result.steps,
        )

    def facts(self) -> Facts:
        starts = sorted(self.start_times[-8:])
        begins = [begin for _, _, begin in self.generating]
        return Facts(
            starting=len(self.engines) - self.serving(),
            ready_groups=len(self.finished),
            step_groups=self.shape.step_groups,
            oldest_generation_s=self.time_s - min(begins, default=self.time_s),
            start_s=starts[len(starts) // 2] if starts else None,
            node_hours_used=self.result.node_hours,
        )

    def count(self) -> None:
        running = sum(engine.begins_s <= self.time_s for engine in self.engines)
        self.result.node_hours += running * TICK_S / 3600
        self.result.trainer_wait += (self.step_ends_s is None) * TICK_S / self.shape.seconds
