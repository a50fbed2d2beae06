"""Dual clip: GRPO whose loss is bounded from both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses


@dataclass(kw_only=True)
class DualClip(Grpo):
    """Dual-clip PPO, arXiv 1912.09729, section 3.3, with GRPO's advantages.

    PPO's loss of a token with A < 0 grows with the ratio without bound: one that became a thousand
    times likelier since it was drawn is the whole step, the more so where gradients are clipped by
    their norm. Here it ends at clip_cap |A|, and with it the gradient. Tokens with A >= 0 are as in
    GRPO.
    """

    name: str = "dual_clip"
    clip_cap: float = bounded(3.0, 1.0)
    """Ratio at which the loss of a token with a negative advantage ends."""

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.losses import TokenLosses

        found = super().token_losses(batch)
        cap = -batch.advantages * self.clip_cap
        capped = (batch.advantages < 0) & (found.loss > cap)
        return TokenLosses(
            cap.where(capped, found.loss),
            found.ratio,
            found.clipped,
            {"dual_clip_fraction": capped},
        )
