"""Dual clip: GRPO with a loss that is bounded on both sides."""

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

    With A < 0, PPO's loss of a token grows with the ratio without bound. A token that became a
    thousand times more likely since it was sampled dominates the step, even more so if gradients
    are clipped by their norm. Here the loss is at most clip_cap |A|, and its gradient is 0 beyond
    that. Tokens with A >= 0 are as in GRPO.
    """

    name: str = "dual_clip"
    clip_cap: float = bounded(3.0, 1.0)
    """Ratio at which the loss of a token with a negative advantage stops growing."""

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.losses import TokenLosses

        losses = super().token_losses(batch)
        cap = -batch.advantages * self.clip_cap
        capped = (batch.advantages < 0) & (losses.loss > cap)
        return TokenLosses(
            cap.where(capped, losses.loss),
            losses.ratio,
            losses.clipped,
            {"dual_clip_fraction": capped},
        )
