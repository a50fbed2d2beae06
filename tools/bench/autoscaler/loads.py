"""Loads of simulated runs: generated shapes, and the load that a run recorded."""

from __future__ import annotations

import bisect
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from simulation import Shape

from relax_hpc.base.metrics.read import is_step, read_metrics
from relax_hpc.config import load_resolved

Load = Callable[[float], float]
LOW, HIGH = 1.0, 4.0
_HALF_HOUR_S = 1800.0


def flat(load: float) -> Load:
    return lambda time_s: load


def step(time_s: float) -> float:
    """Four times the work for the second and third quarter of two hours."""
    return HIGH if _HALF_HOUR_S <= time_s < 3 * _HALF_HOUR_S else LOW


def saw_tooth(period_s: float) -> Load:
    """The work grows from 1 to 4 in each period, and falls at once."""
    return lambda time_s: LOW + (HIGH - LOW) * (time_s % period_s) / period_s


def pulse(period_s: float) -> Load:
    """Four times the work for the first half of each period."""
    return lambda time_s: HIGH if time_s % period_s < period_s / 2 else LOW


def wave(period_s: float) -> Load:
    middle, swing = (HIGH + LOW) / 2, (HIGH - LOW) / 2
    return lambda time_s: middle - swing * math.cos(2 * math.pi * time_s / period_s)


TARGETS = {"flat": 0.85, "step": 0.85, "saw-tooth": 0.80}
"""Shapes with a target: steps per node-hour, relative to the oracle."""
STEPS_TARGET = 0.97
"""Steps, relative to the oracle."""


def shapes() -> list[Shape]:
    """The shapes of the benchmark. The last ones have no target."""
    slow = Shape("slow", lambda time_s: step(time_s / 4))
    return [
        Shape("flat", flat(2.0)),
        Shape("step", step),
        Shape("saw-tooth", saw_tooth(1200.0)),
        Shape("pulse", pulse(1200.0)),
        Shape("wave", wave(2400.0)),
        # Few slow groups delay a step although engines wait.
        Shape("long tail", flat(2.0), slots=8, spread=0.6),
        Shape("queue tail", step, queue_tail=0.1),
        # Steps of two minutes, starts of five.
        replace(
            slow,
            seconds=28800.0,
            step_s=120.0,
            engine_groups_per_s=0.1,
            load_s=120.0,
            queue_s=180.0,
            queue_tail=0.05,
        ),
    ]


def random_shape(seed: int) -> Shape:
    """A shape that nobody has seen before: levels, times and properties of the run are drawn."""
    draw = random.Random(f"shape {seed}")
    seconds = 10800.0
    times_s = sorted(draw.uniform(0.0, seconds) for _ in range(draw.randint(0, 6)))
    levels = [draw.uniform(0.8, 4.5) for _ in range(len(times_s) + 1)]
    return Shape(
        f"random {seed}",
        lambda time_s: levels[bisect.bisect(times_s, time_s)],
        seconds=seconds,
        step_groups=draw.choice((16, 32, 64)),
        step_s=draw.uniform(15.0, 90.0),
        step_grows=draw.choice((0.0, 0.5)),
        engine_groups_per_s=draw.uniform(0.1, 0.4),
        slots=draw.choice((2, 4, 8)),
        spread=draw.uniform(0.1, 0.5),
        staleness=draw.randint(1, 4),
        first_engines=draw.randint(1, 8),
        max_engines=24,
        load_s=draw.uniform(5.0, 60.0),
        queue_s=draw.uniform(5.0, 120.0),
        queue_tail=draw.choice((0.0, 0.05)),
    )


def recorded_shape(folder: Path) -> Shape:
    """The load of a run: work of a prompt group over time, relative to its median, and the
    trainer's seconds per step, from metrics.jsonl and the resolved configuration.

    The work follows from the tokens per response; the speed of an engine from the seconds that
    rollout worked. ValueError: the run has too few steps.
    """
    config = load_resolved(folder)
    rows = [row for row in read_metrics(folder) if is_step(row) and row.get("perf/rollout_tokens")]
    if len(rows) < 3:
        raise ValueError(f"{folder}: found {len(rows)} steps with perf/rollout_tokens, need 3")
    walls = [float(row["perf/step_s"]) for row in rows]
    tokens = [float(row["perf/rollout_tokens"]) for row in rows]
    middle = statistics.median(tokens)
    ends_s: list[float] = []
    for wall_s in walls:
        ends_s.append((ends_s[-1] if ends_s else 0.0) + wall_s)
    waits = [float(row.get("idle/actor", 0.0)) for row in rows]
    train_s = statistics.median(
        wall_s * (1.0 - wait) for wall_s, wait in zip(walls, waits, strict=True)
    )
    groups_per_s = config.prompts_per_step / statistics.median(walls)
    engines = config.rollout.replicas
    busy = 1.0 - statistics.median(float(row.get("idle/rollout", 0.0)) for row in rows)
    last = len(ends_s) - 1
    return Shape(
        f"recorded {folder.name}",
        lambda time_s: tokens[min(bisect.bisect(ends_s, time_s), last)] / middle,
        seconds=ends_s[-1],
        step_groups=config.prompts_per_step,
        step_s=max(train_s, 1.0),
        engine_groups_per_s=groups_per_s / max(busy, 0.05) / engines,
        slots=config.rollout.groups_per_request * config.rollout.requests_in_flight,
        staleness=config.max_staleness,
        first_engines=engines,
        max_engines=4 * engines + 12,
    )


def load_points(path: Path) -> Load:
    """A load from a JSON file [[seconds, work], ...], constant between the points."""
    points = sorted((float(time_s), float(work)) for time_s, work in json.loads(path.read_text()))
    times_s = [time_s for time_s, _ in points[1:]]
    works = [work for _, work in points]
    return lambda time_s: works[bisect.bisect(times_s, time_s)]
