"""REINFORCE++: rewards against all of the step, without a group of responses to each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from relax_hpc.algorithms.base import Prompt, Row, centred, rewards_of, spread
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.settings import bounded

EPS = 1e-8


@dataclass(kw_only=True)
class ReinforcePP(Grpo):
    """arXiv 2501.03262: advantages are normalised over all tokens of the step, in PPO's clipped loss.

    A token's is A_t = R - kl_in_reward * sum over the episode's tokens i >= t of log(rollout_i / reference_i), the
    return without a discount of a reward with a KL penalty a token; then (A - mean) / sqrt(var + 1e-8) with mean and
    unbiased variance over all trained tokens of the step. With `baseline: prompt`, REINFORCE++-baseline, the mean of
    its prompt is taken off R first.
    """

    window: ClassVar[Literal["prompt", "step"]] = "step"

    name: str = "reinforce_pp"
    baseline: Literal["none", "prompt"] = "none"
    """What is taken off the reward before the step's mean: nothing, or the mean of its prompt's rewards."""
    kl_in_reward: float = bounded(0.0, 0.0)
    """Weight of a KL penalty in the reward of each token, which needs a reference; `kl.coefficient` is in the loss."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("reward", "rollout_logprobs", "ref_logprobs") if self.kl_in_reward else ("reward",)

    def token_advantages(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        rewards = rewards_of(prompts)
        if self.baseline == "prompt":
            rewards = centred(rewards)
        episodes = [episode for prompt in prompts for episode in prompt]
        rows = [row for episode in episodes for row in episode]
        tokens = np.array([np.count_nonzero(row["loss_mask"]) for row in rows])
        if self.kl_in_reward:
            returns = map(self._returns, episodes, rewards.flat)
            values = np.split(normalised(np.concatenate([*returns])), np.cumsum(tokens)[:-1])
        else:
            paid = np.repeat(rewards.flat, [len(episode) for episode in episodes])
            values = normalised(paid, tokens)
        return [spread(value, row["loss_mask"]) for value, row in zip(values, rows, strict=True)]

    def _returns(self, episode: Sequence[Row], reward: float) -> np.ndarray:
        """Of the trained tokens of an episode's rows, one row after the other, [n]: what is left of its reward after
        the penalty of these and later ones."""
        penalty = np.concatenate([_penalty(row) for row in episode])
        return reward - self.kl_in_reward * penalty[::-1].cumsum()[::-1]


def _penalty(row: Row) -> np.ndarray:
    """log(rollout / reference) of the trained tokens of a row."""
    trained = row["loss_mask"] > 0
    return row["rollout_logprobs"][trained].astype(np.float64) - row["ref_logprobs"][trained]


def normalised(values: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """``values`` [n] less their mean over their spread, each of them there ``counts`` times (1); 0 if all are equal."""
    counts = np.ones_like(values) if counts is None else counts
    seen, total = values[counts > 0], counts.sum()
    if total < 2 or (seen == seen[0]).all():
        return np.zeros_like(values)
    mean = (counts * values).sum() / total
    var = (counts * (values - mean) ** 2).sum() / (total - 1)
    return (values - mean) / np.sqrt(var + EPS)
