"""GRPO: rewards normalized over the episodes of a prompt, in PPO's clipped loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from relax_hpc.algorithms.base import Algorithm, centred
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses

STD_EPS = 1e-6
"""Added to a standard deviation before the division by it."""


@dataclass(kw_only=True)
class Grpo(Algorithm):
    """Group relative policy optimization, arXiv 2402.03300: A = (R - mean) / (std + 1e-6) with the
    unbiased std, section 4.1.2.

    A token's loss is max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = policy / old: PPO,
    arXiv 1707.06347, equation 7. The two different clip bounds ("clip-higher") and the mean over
    tokens are from DAPO, arXiv 2503.14476, section 3.1.
    """

    name: str = "grpo"
    clip_low: float = bounded(0.2, 0.0, 1.0)
    """The lower clip bound of the ratio is 1 - clip_low."""
    clip_high: float = bounded(0.28, 0.0)
    """The upper clip bound of the ratio is 1 + clip_high."""

    def advantages(self, rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        differences = centred(rewards)
        return differences / (differences.std(axis=1, ddof=1, keepdims=True) + STD_EPS)

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.losses import TokenLosses, clipped_surrogate, ratio_to_old

        ratio = ratio_to_old(batch)
        loss, clipped = clipped_surrogate(ratio, batch.advantages, self.clip_low, self.clip_high)
        return TokenLosses(loss, ratio, clipped)
