"""What is taken off rewards, whitening, and which episodes are left out: DAPO's parts, and its
configuration."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from relax_hpc.algorithms import (
    ALGORITHMS,
    Distill,
    DrGrpo,
    Grpo,
    Ppo,
    ReinforcePP,
    ReinforcePPBaseline,
    Rloo,
)
from relax_hpc.algorithms.base import KlConfig, OverlongConfig
from relax_hpc.base.versions import Version
from relax_hpc.config import load
from relax_hpc.data.prompts import Prompt
from relax_hpc.ops.checks.settings import check
from relax_hpc.roles.advantages import shuffled
from relax_hpc.rollout.engines.engine import Episode, EpisodeRow, FinishReason, Generation
from relax_hpc.rollout.rows import group_rows

CONFIGS = Path(__file__).parents[2] / "configs"


def prompt_of(*episodes: tuple[float, int, int]) -> list:
    """One prompt's episodes, (reward, tokens drawn, of them trained), a row each with a token of
    the prompt before."""
    return [
        [
            {
                "reward": reward,
                "token_versions": np.array([0] + [5] * drawn, np.int32),
                "loss_mask": np.array([0] * (1 + drawn - trained) + [1] * trained, np.uint8),
            }
        ]
        for reward, drawn, trained in episodes
    ]


def test_long_episodes_lose_more_the_longer_they_are() -> None:
    """At most 10 tokens with a buffer of 4: no penalty at 6 sampled tokens, half at 8, full at 10.
    Untrained tokens count."""
    algorithm = DrGrpo(overlong=OverlongConfig(max_tokens=10, buffer=4))
    prompts = [prompt_of((1, 6, 6), (1, 8, 2), (1, 10, 10))]
    assert algorithm.rewards(prompts).tolist() == [[1.0, 0.5, 0.0]]
    assert [row.max() for row in algorithm.token_advantages(prompts)[:1]] == [0.5]
    first, *_, last = ReinforcePP(overlong=algorithm.overlong).token_advantages(prompts)
    assert first[-1] > 0 > last[-1]
    (finding,) = Grpo(overlong=OverlongConfig(max_tokens=4, buffer=5)).findings()
    assert finding == "overlong.buffer: found 5, allowed: at most overlong.max_tokens, 4"
    assert OverlongConfig(max_tokens=4).penalties(np.array([3, 4])).tolist() == [0, 1], (
        "without a buffer: at the limit alone"
    )


def test_a_kl_in_the_reward_is_of_the_whole_episode() -> None:
    """Log-ratios 0.5 and 0.25 of the first, of tokens that it drew: 0.1 * 0.75 off its reward."""
    prompts = [prompt_of((1, 2, 2), (0, 1, 1))]
    for (row,), rollout, ref in zip(
        prompts[0], ([9, -1, -1], [9, -1]), ([0, -1.5, -1.25], [0, -1]), strict=True
    ):
        row |= {
            "rollout_logprobs": np.array(rollout, np.float32),
            "ref_logprobs": np.array(ref, np.float32),
        }
    algorithm = DrGrpo(kl_in_reward=0.1)
    assert algorithm.rewards(prompts) == pytest.approx(np.array([[0.925, 0.0]]))
    assert algorithm.needs == ("reward", "rollout_logprobs", "ref_logprobs")
    # What is masked was drawn all the same: else an episode that was cut would have the higher
    # reward for it.
    for masked in ([0, 0, 0], [0, 0, 1]):
        prompts[0][0][0]["loss_mask"] = np.array(masked, np.uint8)
        assert algorithm.rewards(prompts) == pytest.approx(np.array([[0.925, 0.0]]))
    twice = Grpo(kl_in_reward=0.1, kl=KlConfig(coefficient=0.1))
    (finding,) = twice.findings()
    assert finding.startswith(
        "kl_in_reward: found 0.1 together with kl.coefficient 0.1, allowed: only one"
    )


def test_one_response_to_a_prompt_is_enough_where_none_are_compared() -> None:
    """REINFORCE++ has the step's mean, PPO a critic, distillation its teacher; the others refuse
    it."""
    prompts = [prompt_of((reward, 2, 2)) for reward in (0, 1)]
    for number, ((row,),) in enumerate(prompts):
        row["values"] = np.array([0, 0.25, 0.5], np.float32)
        row["rollout_logprobs"] = np.array([0, -1, -2], np.float32)
        row["teacher_logprobs"] = row["rollout_logprobs"] + np.float32(number)
    low, high = ReinforcePP().token_advantages(prompts)
    assert low[1:].tolist() == pytest.approx([-0.5 / np.sqrt(1 / 3)] * 2) and (low == -high).all()
    assert [row.tolist() for row in Ppo(whiten=False).token_advantages(prompts)] == [
        [0, -0.25, -0.5],
        [0, 0.75, 0.5],
    ]
    assert [row.tolist() for row in Distill().token_advantages(prompts)] == [[0, 0, 0], [0, 1, 1]]
    assert not np.any(Distill(teacher_top_k=2).token_advantages(prompts))
    for other in (Grpo(), DrGrpo(), Rloo(), ReinforcePPBaseline(), Distill(reward_weight=1.0)):
        assert other.fewest_samples == 2
        with pytest.raises(ValueError, match=r"expected \[prompts, episodes >= 2\]"):
            other.token_advantages(prompts)


@pytest.mark.parametrize("samples", [1, 3])
def test_rewards_are_permuted_anew_in_every_step_and_alike_in_the_same(samples: int) -> None:
    """The control experiment: what stays the same in all steps could be learned."""

    def step(first_ticket: int) -> list:
        prompts = [
            prompt_of(*((10 * prompt + episode, 1, 1) for episode in range(samples)))
            for prompt in range(8)
        ]
        for number, prompt in enumerate(prompts):
            for (row,) in prompt:
                row["ticket"] = first_ticket + number
        return prompts

    def rewards_in(prompts: list) -> list[float]:
        return [row["reward"] for (row,) in chain.from_iterable(prompts)]

    drawn = [rewards_in(shuffled(step(8 * number), 3)) for number in (0, 1, 1)]
    before = rewards_in(step(0))
    assert drawn[0] != drawn[1] == drawn[2] and before not in drawn
    assert [sorted(rewards) for rewards in drawn] == [before] * 3, "each reward once"


def test_whitened_advantages_have_mean_zero_and_variance_one_over_all_trained_tokens() -> None:
    prompts = [prompt_of((1, 3, 3), (0, 2, 1)), prompt_of((5, 4, 4), (1, 2, 2))]
    algorithm = DrGrpo(whiten=True)
    assert algorithm.whole_step, "it needs all rows of the step"
    advantages = np.concatenate([fields["advantages"] for fields in algorithm.given(prompts)])
    episodes = chain.from_iterable(prompts)
    mask = np.concatenate([row["loss_mask"] for (row,) in episodes]) > 0
    plain = np.concatenate(DrGrpo().token_advantages(prompts))[mask]
    assert advantages[mask] == pytest.approx((plain - plain.mean()) / plain.std(ddof=1), rel=1e-5)
    assert not advantages[~mask].any() and advantages.dtype == np.float32
    # The result is that of REINFORCE++-baseline.
    (expected,) = [np.concatenate(ReinforcePPBaseline().token_advantages(prompts))]
    assert advantages == pytest.approx(expected, rel=1e-5)
    assert ReinforcePPBaseline().kl.estimator == "k2"
    (finding,) = ReinforcePPBaseline(whiten=True).findings()
    assert finding.startswith("whiten: found true with reinforce_pp_baseline")


def test_episodes_that_were_cut_are_left_out_and_their_rewards_count() -> None:
    versions = np.full(2, Version(1, 1).encode(), np.int32)
    answers = [Generation([5, 6], [-1.0, -1.0], versions, reason) for reason in ("stop", "length")]
    prompt = Prompt("p", (1, 2, 3), "2+2?", "4")
    rows = group_rows(prompt, 0, answers, [1.0, 0.0], whole_only=True)
    assert [row["loss_mask"].tolist() for row in rows] == [[0, 0, 0, 1, 1], [0] * 5]
    good, cut = DrGrpo().token_advantages([[[row] for row in rows]])
    assert good[-1] == 0.5 and not cut.any()
    assert [row["loss_mask"].sum() for row in group_rows(prompt, 0, answers, [1.0, 0.0])] == [2, 2]


@pytest.mark.parametrize("cut_row", [0, 1])
@pytest.mark.parametrize("end", get_args(FinishReason))
def test_an_episode_is_left_out_if_any_of_its_rows_was_cut(end: str, cut_row: int) -> None:
    """A row that was cut, by whichever bound, is no whole attempt: the rows before and behind it
    are not either. The other ends are the policy's or its environment's own, or a bound in
    turns."""
    versions = np.full(2, Version(1, 1).encode(), np.int32)
    reasons = ["stop", "stop"]
    reasons[cut_row] = end
    rows = [
        EpisodeRow((1, 2, 3 + number), Generation([5, 6], [-1.0, -1.0], versions.copy(), reason))
        for number, reason in enumerate(reasons)
    ]
    whole = Generation([5, 6], [-1.0, -1.0], versions.copy(), "stop")
    prompt = Prompt("p", (1, 2, 3), "2+2?", "4")
    group = group_rows(prompt, 0, [Episode(rows), whole], [1.0, 0.0], whole_only=True)
    trained = [int(row["loss_mask"].sum()) for row in group]
    assert trained == ([0, 0, 2] if end in CUTS else [2, 2, 2])


CUTS = {"length", "turn_budget", "sampled_budget", "episode_budget"}
"""Ends that cut what the policy would have said."""


def two_rows(reward: float, *drawn: int) -> list:
    """An episode with a row for each number in ``drawn``, of so many tokens that the policy
    drew."""
    rows = [row for (row,) in prompt_of(*((reward, count, count) for count in drawn))]
    for row in rows:
        row |= {
            name: np.zeros(len(row["loss_mask"]), np.float32)
            for name in ("values", "teacher_logprobs")
        }
        row |= {
            name: np.zeros(len(row["loss_mask"]), np.float32)
            for name in ("rollout_logprobs", "ref_logprobs")
        }
    return rows


@pytest.mark.parametrize("name", [name for name, kind in ALGORITHMS.items() if kind.gives])
def test_a_penalty_for_length_counts_the_tokens_of_all_rows(name: str) -> None:
    """Both episodes draw 4 tokens in their last row. The first has drawn 4 more in a row before, 8
    in all: it loses the whole penalty, in every algorithm that learns from rewards."""
    algorithm = ALGORITHMS[name](overlong=OverlongConfig(max_tokens=8, buffer=2, penalty=0.5))
    if name == "distill":
        algorithm.reward_weight = 1.0
    prompts = [[two_rows(1.0, 4, 4), two_rows(1.0, 4)]]
    assert algorithm.task_rewards(prompts).tolist() == [[0.5, 1.0]]
    fields = algorithm.given(prompts)
    long, short = fields[1]["advantages"][-1], fields[2]["advantages"][-1]
    assert long < short, "the penalty must change the advantages"
    plain = dataclasses.replace(algorithm, overlong=OverlongConfig()).given(prompts)
    assert plain[1]["advantages"][-1] == pytest.approx(plain[2]["advantages"][-1])


def test_dapo_is_a_configuration_file_for_any_run(tmp_path: Path) -> None:
    """All five parts of the paper: clip-higher, a mean over tokens, dynamic sampling, soft
    punishment, and a mask of truncated responses."""
    config = load([CONFIGS / "algorithms" / "dapo.yaml"])
    algorithm = config.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.reduction) == (
        0.2,
        0.28,
        "token_mean",
    )
    assert config.rollout.filter == "rewards_differ" and algorithm.mask_truncated
    assert algorithm.overlong == OverlongConfig(max_tokens=20480, buffer=4096)
    assert config.rollout.max_new_tokens == 20480 and "reference" not in config.groups
    run = {
        "run_dir": str(tmp_path / "run"),
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "data.max_prompt_tokens": 32,
    }
    run |= {
        "rollout.max_new_tokens": 200,
        "algorithm.overlong.max_tokens": 200,
        "algorithm.overlong.buffer": 40,
    }
    config = load([CONFIGS / "algorithms" / "dapo.yaml"], run)
    assert check(config) == []
    config.rollout.max_new_tokens = 100
    (finding,) = check(config)
    assert finding.startswith(
        "algorithm.overlong.max_tokens: found 200, allowed: at most rollout.max_new_tokens, 100"
    )
