"""PPO with a critic: each token against the value of what stood before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from relax_hpc.algorithms.base import Prompt, Row, divergence_to_come, spread
from relax_hpc.algorithms.gae import gae
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class Ppo(Grpo):
    """Proximal policy optimization, arXiv 1707.06347, with generalized advantage estimation, arXiv
    1506.02438.

    The steps of an episode are its trained tokens, of all its rows one after the other: what others
    put between them is no action, and no step. The last step gets the episode's reward. Each step
    loses `kl_in_reward` times its divergence and that of the drawn tokens which follow it and are
    not trained. The critic, another group, values the state before each token, and learns A + V
    from its value_loss.
    """

    gives: ClassVar[tuple[str, ...]] = ("advantages", "returns")
    fewest_samples: ClassVar[int] = 1

    name: str = "ppo"
    gamma: float = bounded(1.0, 0.0, 1.0)
    """Discount factor of each token."""
    gae_lambda: float = bounded(1.0, 0.0, 1.0)
    """Weight of later tokens in generalized advantage estimation. 1: an advantage is the return
    less the value, unbiased; less: more of it is what the critic thinks, and it varies less."""
    clip_high: float = bounded(0.2, 0.0)
    """Upper edge of the ratio is 1 + clip_high."""
    value_clip: float = bounded(0.2, 0.0)
    """Distance that a value may move from the one that advantages were made with before its
    gradient ends. 0: any."""
    critic_warmup_steps: int = bounded(0, 0)
    """First steps, in which the critic learns alone and the policy stays as it is."""
    whiten: bool = True
    """Give advantages mean 0 and variance 1 over the trained tokens of the step, on whichever rank
    they are."""

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
        self, predicted: Tensor, known: Mapping[str, Tensor], mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from relax_hpc.algorithms.values import clipped_value_loss

        return clipped_value_loss(
            predicted, known["values"], known["returns"], mask, self.value_clip
        )

    def _estimates(self, prompts: Sequence[Prompt]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Advantages and returns of all rows, [tokens] each, 0 where the mask is."""
        episodes = [episode for prompt in prompts for episode in prompt]
        known = [
            np.concatenate([_trained(row, row["values"]) for row in episode])
            for episode in episodes
        ]
        values, rewards = (np.zeros((max(map(len, known)), len(episodes))) for _ in range(2))
        for column, (episode, found, reward) in enumerate(
            zip(episodes, known, self.task_rewards(prompts).flat, strict=True)
        ):
            values[: len(found), column] = found
            if len(found):
                rewards[: len(found), column] = self._rewards_of(episode)
                rewards[len(found) - 1, column] += reward
        advantages = gae(rewards, values, self.gamma, self.gae_lambda)
        return _spread(episodes, advantages), _spread(episodes, advantages + values)

    def _rewards_of(self, episode: Sequence[Row]) -> np.ndarray | float:
        """Reward of each of its trained tokens for staying near the reference. A token that is
        drawn and not trained is paid for by the trained one before it."""
        if not self.kl_in_reward:
            return 0.0
        return self.kl_in_reward * np.diff(divergence_to_come(episode), append=0.0)


def _trained(row: Row, values: np.ndarray) -> np.ndarray:
    return values[row["loss_mask"] > 0]


def _spread(episodes: Sequence[Sequence[Row]], table: np.ndarray) -> list[np.ndarray]:
    """Columns of ``table`` [t, n], one an episode, on the trained tokens of its rows."""
    made = []
    for episode, column in zip(episodes, table.T, strict=True):
        ends = list(accumulate(np.count_nonzero(row["loss_mask"]) for row in episode))
        pairs = zip([0, *ends], ends, episode, strict=False)
        made += [spread(column[start:end], row["loss_mask"]) for start, end, row in pairs]
    return made
