"""REINFORCE++: rewards against all of the step, without a group of responses to each prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from relax_hpc.algorithms.base import (
    KlConfig,
    Prompt,
    Row,
    centred,
    divergence_to_come,
    normalised,
    spread,
)
from relax_hpc.algorithms.grpo import Grpo


@dataclass(kw_only=True)
class ReinforcePP(Grpo):
    """arXiv 2501.03262: advantages are normalised over all tokens of the step, in PPO's clipped
    loss.

    A token's is A_t = R - kl_in_reward * sum over the episode's tokens i >= t of log(rollout_i /
    reference_i), the return without a discount of a reward with a KL penalty a token; then (A -
    mean) / sqrt(var + 1e-8) with mean and unbiased variance over all trained tokens of the step.
    With `baseline: prompt`, REINFORCE++-baseline, the mean of its prompt is taken off R first.
    """

    window: ClassVar[Literal["prompt", "step"]] = "step"

    name: str = "reinforce_pp"
    baseline: Literal["none", "prompt"] = "none"
    """Baseline that is taken off the reward before the step's mean: nothing, or the mean of its
    prompt's rewards."""

    @property
    def fewest_samples(self) -> int:
        """Episodes that a prompt must have: its mean needs two, that of the step one."""
        return 2 if self.baseline == "prompt" else 1

    def findings(self) -> Iterator[str]:
        yield from super().findings()
        if self.whiten:
            yield f"whiten: found true with {self.name}, allowed: false; it does that by itself"

    def token_advantages(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        rewards = self.task_rewards(prompts)
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
        """Returns of the trained tokens of an episode's rows, one row after the other, [n]: its
        reward less the KL penalties of this token and all that were drawn later."""
        return reward - self.kl_in_reward * divergence_to_come(episode)


@dataclass(kw_only=True)
class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++-baseline, arXiv 2501.03262, section 3.3: the mean of the prompt's rewards is
    taken off each, then all are normalised over the tokens of the step; a KL, if there is one, is
    in the loss, by `k2`."""

    name: str = "reinforce_pp_baseline"
    baseline: Literal["none", "prompt"] = "prompt"
    """Baseline that is taken off the reward before the step's mean: nothing, or the mean of its
    prompt's rewards."""
    kl: KlConfig = field(default_factory=lambda: KlConfig(estimator="k2"))
