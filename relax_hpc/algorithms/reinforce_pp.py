"""REINFORCE++: rewards against all of the step, without a group of responses to each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from relax_hpc.algorithms.base import Prompt, Row, centred, rewards_of
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.settings import bounded

EPS = 1e-8


@dataclass(kw_only=True)
class ReinforcePP(Grpo):
    """arXiv 2501.03262: advantages are normalised over all tokens of the step, in PPO's clipped loss.

    A token's is A_t = R - kl_in_reward * sum over tokens i >= t of log(rollout_i / reference_i), the return without a
    discount of a reward with a KL penalty a token; then (A - mean) / sqrt(var + 1e-8) with mean and unbiased variance
    over all trained tokens of the step. With `baseline: prompt`, REINFORCE++-baseline, the mean of its prompt is taken
    off R first.
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
        episodes = (episode for prompt in prompts for episode in prompt)
        rows = [(row, reward) for episode, reward in zip(episodes, rewards.flat, strict=True) for row in episode]
        found = normalised([self._returns(row, reward) for row, reward in rows])
        return [_placed(values, row["loss_mask"]) for values, (row, _) in zip(found, rows, strict=True)]

    def _returns(self, row: Row, reward: float) -> np.ndarray:
        """Of the trained tokens of a row [n]: what is left of its reward after the penalty of these and later ones."""
        trained = np.asarray(row["loss_mask"]) > 0
        if not self.kl_in_reward:
            return np.full(np.count_nonzero(trained), reward)
        penalty = row["rollout_logprobs"][trained].astype(np.float64) - row["ref_logprobs"][trained]
        return reward - self.kl_in_reward * penalty[::-1].cumsum()[::-1]


def normalised(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Arrays of any lengths less their common mean, over their common spread; exactly 0 if all entries are equal."""
    values = np.concatenate(parts)
    if values.size < 2 or (values == values[0]).all():
        return [np.zeros_like(part) for part in parts]
    mean, scale = values.mean(), np.sqrt(values.var(ddof=1) + EPS)
    return [(part - mean) / scale for part in parts]


def _placed(values: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    out = np.zeros(len(loss_mask), np.float32)
    out[np.asarray(loss_mask) > 0] = values
    return out
