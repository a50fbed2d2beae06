"""CISPO: clipped importance weights, and a gradient from every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses


@dataclass(kw_only=True)
class Cispo(Grpo):
    """MiniMax-M1, arXiv 2506.13585, section 3.1, with GRPO's advantages.

    A token's loss is -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log policy (equations 4 and 5):
    REINFORCE with clipped weights. PPO's clip takes a token that has moved too far out of the
    gradient, often the rare one that a line of thought turns on; here its weight is bounded, and it
    stays.
    """

    name: str = "cispo"
    clip_low: float = bounded(1.0, 0.0, 1.0)
    """Smallest weight is 1 - clip_low. 1: there is no lower edge, as in the paper."""
    clip_high: float = bounded(4.0, 0.0)
    """Largest weight is 1 + clip_high. The paper tunes it and says no number; 5 is that of arXiv
    2510.13786."""

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.losses import TokenLosses, ratio_to_old

        ratio = ratio_to_old(batch)
        weight = ratio.detach().clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return TokenLosses(-weight * batch.advantages * batch.logprobs, ratio, weight != ratio)
