"""CISPO: clipped importance weights, so that every token keeps a gradient."""

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
    REINFORCE with clipped weights. PPO's clip removes the gradient of a token whose probability has
    changed too much; often that is a rare token that decides a chain of thought. CISPO bounds the
    weight of such a token, and the token keeps its gradient.
    """

    name: str = "cispo"
    clip_low: float = bounded(1.0, 0.0, 1.0)
    """The smallest weight is 1 - clip_low. With 1 there is no lower bound, as in the paper."""
    clip_high: float = bounded(4.0, 0.0)
    """The largest weight is 1 + clip_high. The paper gives no number; a largest weight of 5 is from
    arXiv 2510.13786."""

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.losses import TokenLosses, ratio_to_old

        ratio = ratio_to_old(batch)
        weight = ratio.detach().clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return TokenLosses(-weight * batch.advantages * batch.logprobs, ratio, weight != ratio)
