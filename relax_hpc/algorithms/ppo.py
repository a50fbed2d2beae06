"""PPO with a critic: the advantage of each token is relative to the value of the state before
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from relax_hpc.algorithms.base import Prompt, Row, divergence_to_come, spread
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from torch import Tensor


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """Return the advantages [t, n] of n episodes, float64, from ``rewards`` after and ``values``
    before each of their t tokens.

    A_t = sum over l >= 0 of (gamma lambda)^l d_(t+l) with d_t = r_t + gamma V_(t+1) - V_t; arXiv
    1506.02438, equation 16. Shorter episodes are padded with zeros in both arrays: the value after
    the end of an episode is 0.

    >>> gae(np.array([[0.0], [1.0]]), np.array([[0.5], [0.25]]), gamma=1.0, gae_lambda=0.5).tolist()
    [[0.125], [0.75]]
    """
    advantages = rewards - values
    advantages[:-1] += gamma * values[1:]
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += gamma * gae_lambda * advantages[t + 1]
    return advantages


@dataclass(kw_only=True)
class Ppo(Grpo):
    """Proximal policy optimization, arXiv 1707.06347, with generalized advantage estimation, arXiv
    1506.02438.

    The steps of an episode are its trained tokens, over all its rows in order. Tokens that were not
    sampled are neither actions nor steps. The last step gets the episode's reward. Each step has a
    penalty of `kl_in_reward` times its divergence and the divergence of those sampled tokens that
    follow it and are not trained. The critic, another group, estimates the value of the state
    before each token. It learns A + V by `value_loss`.
    """

    gives: ClassVar[tuple[str, ...]] = ("advantages", "returns")
    fewest_samples: ClassVar[int] = 1

    name: str = "ppo"
    gamma: float = bounded(1.0, 0.0, 1.0)
    """Discount factor of each token."""
    gae_lambda: float = bounded(1.0, 0.0, 1.0)
    """Weight of later tokens in generalized advantage estimation. With 1 an advantage is the return
    minus the value, which is unbiased. A smaller number relies more on the critic and has a lower
    variance."""
    clip_high: float = bounded(0.2, 0.0)
    """The upper clip bound of the ratio is 1 + clip_high."""
    value_clip: float = bounded(0.2, 0.0)
    """Largest change of a value, relative to the value that advantages were computed from, before
    its gradient becomes 0. With 0 there is no limit."""
    critic_warmup_steps: int = bounded(0, 0)
    """Number of first steps in which only the critic learns and the policy does not change."""
    whiten: bool = True
    """Normalize advantages to mean 0 and variance 1 over all trained tokens of the step, on all
    ranks."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, "values")

    def trains_policy(self, step: int) -> bool:
        return step >= self.critic_warmup_steps

    def token_advantages(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        return self._estimates(prompts)[0]

    def given(self, prompts: Sequence[Prompt]) -> list[dict[str, np.ndarray]]:
        advantages, returns = self._estimates(prompts)
        pairs = zip(self.whitened(advantages, prompts), returns, strict=True)
        return [{"advantages": advantage, "returns": value} for advantage, value in pairs]

    def value_loss(
        self, predicted: Tensor, fields: Mapping[str, Tensor], mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from relax_hpc.algorithms.values import clipped_value_loss

        return clipped_value_loss(
            predicted, fields["values"], fields["returns"], mask, self.value_clip
        )

    def _estimates(self, prompts: Sequence[Prompt]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return advantages and returns of all rows, [tokens] each, 0 where the mask is 0."""
        episodes = list(chain.from_iterable(prompts))
        episode_values = [
            np.concatenate([_trained(row, row["values"]) for row in episode])
            for episode in episodes
        ]
        shape = (max(map(len, episode_values)), len(episodes))
        values = np.zeros(shape)
        rewards = np.zeros(shape)
        task_rewards = self.task_rewards(prompts).flat
        for column, (episode, state_values, reward) in enumerate(
            zip(episodes, episode_values, task_rewards, strict=True)
        ):
            length = len(state_values)
            values[:length, column] = state_values
            if length:
                rewards[:length, column] = self._kl_rewards(episode)
                rewards[length - 1, column] += reward
        advantages = gae(rewards, values, self.gamma, self.gae_lambda)
        return _spread(episodes, advantages), _spread(episodes, advantages + values)

    def _kl_rewards(self, episode: Sequence[Row]) -> np.ndarray | float:
        """Return the negative KL penalty of each trained token. The penalty of a token that is
        sampled and not trained is added to the trained token before it."""
        if not self.kl_in_reward:
            return 0.0
        return self.kl_in_reward * np.diff(divergence_to_come(episode), append=0.0)


def _trained(row: Row, values: np.ndarray) -> np.ndarray:
    return values[row["loss_mask"] > 0]


def _spread(episodes: Sequence[Sequence[Row]], table: np.ndarray) -> list[np.ndarray]:
    """Return the columns of ``table`` [t, n], one per episode, on the trained tokens of its
    rows."""
    values = []
    for episode, column in zip(episodes, table.T, strict=True):
        ends = list(accumulate(np.count_nonzero(row["loss_mask"]) for row in episode))
        starts = [0, *ends][:-1]
        for start, end, row in zip(starts, ends, episode, strict=True):
            values.append(spread(column[start:end], row["loss_mask"]))
    return values
