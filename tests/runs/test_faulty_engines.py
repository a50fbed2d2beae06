"""The rollout role with an engine or a reward that fails: faults are counted, and too many of them
end the run with a message of one line."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.base.errors import NoProgressError, RelaxError
from relax_hpc.base.metrics.writer import GENERATED, GENERATED_SUM
from relax_hpc.config import dump
from relax_hpc.config.schema import RolloutConfig
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.rewards import RewardInput
from relax_hpc.rollout.engines.engine import EngineFault, GenerateRequest, Generation
from relax_hpc.rollout.outcomes import Failure, Outcomes
from tests.helpers.audit import read_events
from tests.helpers.faulty_data import BAD_LINES
from tests.helpers.faulty_engine import (
    FaultyEngine,
    training_actor,
    use_reward,
    world,  # noqa: F401
)
from tests.helpers.run_helpers import queue_rows

# ruff: noqa: F811

pytestmark = pytest.mark.run

HANG_LIMIT_S = 240.0


# -- engines ---------------------------------------------------------------------------------------


def test_faults_of_the_engine_are_counted_and_the_run_continues(world: SimpleNamespace) -> None:
    with training_actor(world):
        world.rollout(["timeout", "timeout", "nan"])
    state: QueueState = world.controller.state
    assert state.progress.finished() and state.counts.noted == {"engine_fault/timeout": 2}
    # One sample is bad, and both samples of its prompt group are dropped.
    assert state.counts.dropped == {"nan_logprob": 2}


@pytest.mark.parametrize(
    ("bad_updates", "faults"), [([0, 1, 1], 2), ([1, 0], 1)], ids=["first updates", "later update"]
)
def test_an_engine_whose_update_fails_is_replaced(
    world: SimpleNamespace, bad_updates: list[int], faults: int
) -> None:
    with training_actor(world):
        world.rollout([], bad_updates=bad_updates)
    assert world.controller.state.progress.finished()
    assert world.controller.state.counts.noted == {"engine_fault/update_failed": faults}


def test_an_engine_that_generates_with_old_weights_is_replaced(world: SimpleNamespace) -> None:
    with training_actor(world):
        world.rollout(["old", "well", "old"])
    state: QueueState = world.controller.state
    assert state.progress.finished() and not state.counts.dropped
    assert state.counts.noted == {"engine_fault/old_version": 1}


class OldGreedyEngine(FaultyEngine):
    """Engine that answers some greedy requests with old weights: one for each of `faults`."""

    faults: list[str]

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.sampling.temperature or not self.faults:
            return await super().generate(request)
        self.faults.pop()
        raise EngineFault("old_version", "found tokens of version 0")


@pytest.mark.parametrize("world", [1], indirect=True)
def test_an_engine_that_evaluates_with_old_weights_is_replaced_and_evaluates(
    world: SimpleNamespace,
) -> None:
    world.config.data.eval = {"heldout": world.config.data.train}
    kind = type("Old", (OldGreedyEngine,), {"faults": ["old"]})
    with training_actor(world):
        world.rollout([], kind=kind)
    state: QueueState = world.controller.state
    assert state.progress.finished() and state.counts.noted == {"engine_fault/old_version": 1}


def test_a_group_whose_engines_all_generate_with_old_weights_ends(world: SimpleNamespace) -> None:
    with pytest.raises(RelaxError, match=r"faulty: 3 engines in a row, last: old_version"):
        world.rollout(["old"] * 9)


def test_a_group_whose_updates_all_fail_ends(world: SimpleNamespace) -> None:
    message = r"faulty: 3 engines in a row, last: update_failed: .* half of it"
    with pytest.raises(RelaxError, match=message):
        world.rollout([], bad_updates=[1] * 9)


def test_an_engine_that_always_fails_ends_its_group(world: SimpleNamespace) -> None:
    message = r"faulty failed 3 times in a row, last: timeout: .* within 2 s"
    with pytest.raises(RelaxError, match=message):
        world.rollout(["timeout"] * 3)
    assert world.controller.state.counts.noted == {"engine_fault/timeout": 3}


def test_bad_lines_are_counted_once_per_run(world: SimpleNamespace) -> None:
    path = Path(world.config.data.train)
    path.write_text("\n".join([path.read_text().strip(), *BAD_LINES.values()]))
    world.config.data.max_bad_share, world.config.data.max_prompt_tokens = 0.2, 8
    for incarnation in (1, 2):
        with pytest.raises(RelaxError, match="faulty failed 3 times"):
            world.rollout(["timeout"] * 3, incarnation)
    expected = {f"bad_prompt/{reason}": 1 for reason in BAD_LINES}
    assert world.controller.state.counts.noted == expected | {"engine_fault/timeout": 6}


# -- rewards ---------------------------------------------------------------------------------------


def test_a_reward_that_hangs_fails_its_group_only(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, calls = threading.Event(), iter([True])

    def reward(_: RewardInput) -> float:
        if next(calls, False):
            hang.wait(HANG_LIMIT_S)
        return 1.0

    use_reward(monkeypatch, reward)
    world.config.rollout.reward_timeout_s = 0.3
    with training_actor(world):
        try:
            world.rollout([])
        finally:
            hang.set()
    state: QueueState = world.controller.state
    assert state.progress.finished() and state.counts.dropped.keys() == {"reward_timeout"}


def test_a_reward_that_exits_fails_its_group_only(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    calls = iter([True])
    use_reward(monkeypatch, lambda _: sys.exit(3) if next(calls, False) else 1.0)
    with training_actor(world):
        world.rollout([])
    state: QueueState = world.controller.state
    assert state.progress.finished() and state.counts.dropped == {"reward_exception": 2}
    assert "reward_exception: SystemExit: 3 (prompt p" in capsys.readouterr().out


def test_a_ticket_may_fail_often_while_the_share_of_failures_allows_it(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four prompts always fail. Each failure is counted, and another prompt gets the
    ticket."""

    def reward(sample: RewardInput) -> float:
        return 1 / (int(sample.prompt[:-1]) % 4 == 3)

    use_reward(monkeypatch, reward)
    world.config.rollout.max_failed_share = 0.9
    with training_actor(world):
        world.rollout([])
    state: QueueState = world.controller.state
    failures = [group.failures for group in state.groups.values()]
    assert state.progress.finished() and max(failures) > 4, failures
    assert state.counts.dropped == {"reward_exception": 2 * sum(failures)}


def test_too_large_a_share_of_failures_ends_the_run(world: SimpleNamespace) -> None:
    world.config.samples_per_prompt = 2
    world.config.rollout.reward = "builtins:len"
    message = r"100% of the last 64 prompt groups failed.*reward_.*=50%"
    with pytest.raises(NoProgressError, match=message):
        world.rollout([])


def test_random_failures_below_the_allowed_share_never_end_a_run() -> None:
    """One fifth of all groups fails. Lost groups whose failure is counted already count once."""
    generator = random.Random(5)
    failure = Failure("reward_exception", "no")
    outcomes = Outcomes(RolloutConfig(max_failed_share=0.5))
    for _ in range(20_000):
        outcomes.count(failure if generator.random() < 0.2 else [])
        outcomes.check_share(failure)
    outcomes.note_failures(7, 9)
    outcomes.count_lost(7, 9, "is known")


def test_groups_that_are_lost_after_they_were_put_count_as_failures() -> None:
    outcomes = Outcomes(RolloutConfig(max_failed_share=0.5))
    message = "% of the last 64 prompt groups failed, the last by it was put"
    with pytest.raises(NoProgressError, match=message):
        for ticket in range(100):
            outcomes.count([])
            outcomes.count_lost(ticket, 1, "it was put")


def test_a_run_ends_if_all_groups_fail_even_if_the_share_allows_it() -> None:
    failure = Failure("reward_exception", "no")
    outcomes = Outcomes(RolloutConfig(max_failed_share=1.0))
    with pytest.raises(NoProgressError, match="100% of the last 64"):
        for _ in range(64):
            outcomes.count(failure)
            outcomes.check_share(failure)


# -- filters ---------------------------------------------------------------------------------------


def test_groups_that_a_filter_drops_are_replaced(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filter drops prompts with odd numbers, whose reward is 1. Even numbers have reward 0."""
    world.config.rollout.filter = "tests.runs.test_faulty_engines:all_rewards_are_zero"
    use_reward(monkeypatch, lambda sample: float(int(sample.prompt[:-1]) % 2))
    reports: list[dict[str, float]] = []
    world.controller.service.on_report = lambda role, step, values, seconds: reports.append(values)
    with training_actor(world):
        world.rollout([])
    state: QueueState = world.controller.state
    filtered_samples = state.counts.dropped["filtered"]
    assert state.progress.finished() and filtered_samples > 0
    assert filtered_samples == 2 * sum(group.filtered for group in state.groups.values())
    dump(world.config, world.run.config)
    assert all(int(row["prompt_id"][1:]) % 2 == 0 for row in queue_rows(world.run).values())
    assert sum(values.get(GENERATED, 0.0) for values in reports) == filtered_samples + 8
    assert sum(values.get(GENERATED_SUM, 0.0) for values in reports) == filtered_samples
    failures = [event for event in read_events(world.run) if event["what"] == "failed"]
    assert {event["reason"] for event in failures} == {"filtered"}


def all_rewards_are_zero(rewards: Sequence[float]) -> bool:
    """Filter that keeps a group only if it has no reward."""
    return not any(rewards)


def test_a_filter_that_drops_everything_ends_the_run(world: SimpleNamespace) -> None:
    world.config.rollout.filter = "rewards_differ"
    message = (
        r"filter rewards_differ dropped 100.0% of the last 256 prompt groups, the last "
        r"with rewards \[0.0\]"
    )
    with pytest.raises(NoProgressError, match=message):
        world.rollout([])
    assert world.controller.state.counts.dropped["filtered"] >= 2 * 256 - 8
