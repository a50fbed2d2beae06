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
        paid = [(row, reward) for episode, reward in zip(episodes, rewards.flat, strict=True) for row in episode]
        if self.kl_in_reward:
            returns = [self._returns(row, reward) for row, reward in paid]
            found = normalised(np.concatenate(returns))
            values = np.split(found, np.cumsum([len(part) for part in returns])[:-1])
        else:
            tokens = np.array([np.count_nonzero(row["loss_mask"]) for row, _ in paid])
            values = normalised(np.array([reward for _, reward in paid]), tokens)
        return [spread(value, row["loss_mask"]) for value, (row, _) in zip(values, paid, strict=True)]

    def _returns(self, row: Row, reward: float) -> np.ndarray:
        """Of the trained tokens of a row [n]: what is left of its reward after the penalty of these and later ones."""
        trained = row["loss_mask"] > 0
        penalty = row["rollout_logprobs"][trained].astype(np.float64) - row["ref_logprobs"][trained]
        return reward - self.kl_in_reward * penalty[::-1].cumsum()[::-1]


def normalised(values: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """``values`` [n] less their mean over their spread, each of them there ``counts`` times (1); 0 if all are equal."""
    counts = np.ones_like(values) if counts is None else counts
    seen, total = values[counts > 0], counts.sum()
    if total < 2 or (seen == seen[0]).all():
        return np.zeros_like(values)
    mean = (counts * values).sum() / total
    var = (counts * (values - mean) ** 2).sum() / (total - 1)
    return (values - mean) / np.sqrt(var + EPS)
