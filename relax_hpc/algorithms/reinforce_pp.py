"""REINFORCE++: rewards normalized over the whole step, without groups of responses to a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np

from relax_hpc.algorithms.base import (
    KlConfig,
    Prompt,
    Row,
    centred,
    divergence_to_come,
    normalised,
    rows_of,
    spread,
)
from relax_hpc.algorithms.grpo import Grpo


@dataclass(kw_only=True)
class ReinforcePP(Grpo):
    """arXiv 2501.03262: advantages are normalized over all tokens of the step, in PPO's clipped
    loss.

    The return of a token is A_t = R - kl_in_reward * sum over the episode's tokens i >= t of
    log(rollout_i / reference_i). This is the undiscounted return of a reward with a KL penalty for
    each token. The advantage is (A - mean) / sqrt(var + 1e-8), with mean and unbiased variance over
    all trained tokens of the step. With `baseline: prompt` (REINFORCE++-baseline) the mean of the
    prompt's rewards is first subtracted from R.
    """

    window: ClassVar[Literal["prompt", "step"]] = "step"

    name: str = "reinforce_pp"
    baseline: Literal["none", "prompt"] = "none"
    """Baseline that is subtracted from the reward before the step's mean: nothing, or the mean of
    the prompt's rewards."""

    @property
    def fewest_samples(self) -> int:  # type: ignore[override]  # `baseline` decides it
        """Smallest number of episodes of a prompt: 2 for a mean over the prompt, otherwise 1."""
        return 2 if self.baseline == "prompt" else 1

    def findings(self) -> Iterator[str]:
        yield from super().findings()
        if self.whiten:
            yield (
                f"whiten: found true with {self.name}, allowed: false; the algorithm normalizes "
                "advantages already"
            )

    def token_advantages(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        rewards = self.task_rewards(prompts)
        if self.baseline == "prompt":
            rewards = centred(rewards)
        episodes = list(chain.from_iterable(prompts))
        rows = rows_of(prompts)
        tokens = np.array([np.count_nonzero(row["loss_mask"]) for row in rows])
        values: Sequence[Any]
        if self.kl_in_reward:
            returns = list(map(self._returns, episodes, rewards.flat))
            values = np.split(normalised(np.concatenate(returns)), np.cumsum(tokens)[:-1])
        else:
            row_rewards = np.repeat(rewards.flat, [len(episode) for episode in episodes])
            values = list(normalised(row_rewards, tokens))
        return [spread(value, row["loss_mask"]) for value, row in zip(values, rows, strict=True)]

    def _returns(self, episode: Sequence[Row], reward: float) -> np.ndarray:
        """Return the returns of the trained tokens of an episode's rows in order, [n]: its reward
        minus the KL penalties of the token and of all tokens that were sampled later."""
        return reward - self.kl_in_reward * divergence_to_come(episode)


@dataclass(kw_only=True)
class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++-baseline, arXiv 2501.03262, section 3.3: the mean of the prompt's rewards is
    subtracted from each reward, then all are normalized over the tokens of the step. A KL term, if
    there is one, is in the loss, with `k2`."""

    name: str = "reinforce_pp_baseline"
    baseline: Literal["none", "prompt"] = "prompt"
    """Baseline that is subtracted from the reward before the step's mean: nothing, or the mean of
    the prompt's rewards."""
    kl: KlConfig = field(default_factory=lambda: KlConfig(estimator="k2"))
