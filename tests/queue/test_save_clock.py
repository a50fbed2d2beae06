"""Checkpoints that are due by time: the hub decides, and all trainers save the same steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.config.schema import CheckpointConfig
from relax_hpc.queue.controller.handlers.training import _next_timed_save
from relax_hpc.queue.controller.save_clock import SaveClock
from relax_hpc.queue.controller.state.progress import Progress
from relax_hpc.queue.plan import Plan
from tests.helpers.queue_helpers import small

STEPS = 40


class Hub:
    """What the hub decides for trainers that train steps and ask, at times of a fake clock."""

    def __init__(self, settings: CheckpointConfig, trainers: tuple[str, ...] = ("actor",)) -> None:
        plan = replace(
            Plan.from_config(small(steps=STEPS)), trainers={name: name for name in trainers}
        )
        self.now, self.settings = 0.0, settings
        self.progress = Progress(plan)
        self.service: Any = SimpleNamespace(
            state=SimpleNamespace(progress=self.progress),
            save_clock=SaveClock(settings, lambda: self.now),
        )
        self.saved: dict[str, list[int]] = {name: [] for name in trainers}
        """Steps that each trainer saves because time requires it."""

    def train(self, trainer: str, at_s: float) -> None:
        """A trainer trains its next step, and saves the one after if the hub says so."""
        self.now, step = at_s, self.progress.trained[trainer]
        if save_at := _next_timed_save(self.service, step):
            self.progress.timed_saves.append(save_at)
        self.progress.train(trainer, step)
        if step + 2 in self.progress.timed_saves:
            self.saved[trainer].append(step + 2)


def saves(settings: CheckpointConfig, step_s: list[float]) -> list[int]:
    hub = Hub(settings)
    for at_s in accumulate(step_s):
        hub.train("actor", at_s)
    return hub.saved["actor"]


@pytest.mark.parametrize(
    ("every", "every_s", "step_s", "timed"),
    [
        # The clock begins with the first step: what was loaded before it does not count.
        (1000, 600.0, [3000.0] + [60.0] * 25, [11, 21]),
        (5, 600.0, [60.0] * 20, []),
        (7, 300.0, [60.0] * 20, [6, 12, 19]),
        (1000, 600.0, [700.0] * 5, [3, 4, 5, 6]),
        (1000, 0.0, [700.0] * 5, []),
    ],
    ids=["time alone", "steps first", "both", "steps longer than it", "off"],
)
def test_whichever_comes_first(
    every: int, every_s: float, step_s: list[float], timed: list[int]
) -> None:
    assert saves(CheckpointConfig(every=every, every_s=every_s), step_s) == timed


@given(st.lists(st.integers(1, 400), min_size=3, max_size=STEPS), st.integers(1, 12))
def test_no_more_than_the_interval_and_a_step_is_unsaved(durations: list[int], every: int) -> None:
    settings = CheckpointConfig(every=every, every_s=600.0)
    timed = saves(settings, [float(seconds) for seconds in durations])
    ends = [0, *accumulate(durations)]
    saved_at = ends[1]
    for step in range(2, len(ends)):
        if step in timed or step % every == 0:
            saved_at = ends[step]
        # A step may be longer than the one before, by which it was judged.
        assert ends[step] - saved_at <= 600 + durations[step - 1]


@given(st.lists(st.booleans(), min_size=10, max_size=2 * STEPS), st.integers(1, 300))
def test_all_trainers_save_the_same_steps(turns: list[bool], step_s: int) -> None:
    """Whichever of them is ahead."""
    hub = Hub(CheckpointConfig(every=1000, every_s=600.0), ("actor", "critic"))
    for number, is_actor in enumerate(turns):
        trainer = "actor" if is_actor else "critic"
        if hub.progress.trained[trainer] < STEPS:
            hub.train(trainer, float(number * step_s))
    both = sorted(hub.saved.values(), key=len)
    assert both[1][: len(both[0])] == both[0]
    behind = min(hub.progress.trained.values())
    assert len(both[0]) == len([step for step in both[1] if step <= behind + 1])


def test_a_whole_checkpoint_settles_those_before_it() -> None:
    progress = Hub(CheckpointConfig()).progress
    progress.timed_saves = [3, 5, 8]
    assert progress.save(5, "actor", {"name": "c"}) and progress.timed_saves == [8]
    again = Hub(CheckpointConfig()).progress
    again.load(progress.dump())
    assert again == progress
