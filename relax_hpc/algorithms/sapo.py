"""SAPO: a smooth gate instead of PPO's clip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_hpc.algorithms.base import Algorithm, Reduction
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses

OPEN = 0.9
"""A token counts as clipped if its gate reduces its gradient below this share."""


@dataclass(kw_only=True)
class Sapo(Algorithm):
    """Soft adaptive policy optimization, arXiv 2511.20347, with GRPO's advantages.

    A token's loss is -A (4 / t) sigmoid(t (r - 1)). Its gradient is the gradient of -A r, times
    4 p (1 - p) with p = sigmoid(t (r - 1)). This factor is 1 at r = 1 and falls towards 0 on both
    sides, while PPO's gradient is cut at a bound. The temperature t is larger where A < 0, because
    lowering the probability of a token raises the probabilities of all other tokens.
    """

    name: str = "sapo"
    temperature_up: float = bounded(1.0, 0.0)
    """Temperature of the gate for tokens with a positive advantage. The larger it is, the faster
    the gate closes."""
    temperature_down: float = bounded(1.05, 0.0)
    """Temperature of the gate for tokens with a negative advantage."""
    reduction: Reduction = "sequence_mean"
    """Average of the loss over an optimizer step; options as in all algorithms.

    The paper takes the mean over sequences.
    """

    advantages = Grpo.advantages

    def findings(self) -> Iterator[str]:
        yield from super().findings()
        for name in ("temperature_up", "temperature_down"):
            if getattr(self, name) == 0:
                yield f"{name}: found 0.0, allowed: above 0; the loss is divided by it"

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.losses import TokenLosses, ratio_to_old

        ratio = ratio_to_old(batch)
        raised = batch.advantages > 0
        temperature_up = ratio.new_full((), self.temperature_up)
        temperature = temperature_up.where(raised, self.temperature_down)
        gate = (temperature * (ratio - 1.0)).sigmoid()
        share = 4.0 * (gate * (1.0 - gate)).detach()
        return TokenLosses(-batch.advantages * 4.0 / temperature * gate, ratio, share < OPEN)
