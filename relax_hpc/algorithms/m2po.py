"""M2PO: a clip whose bounds depend on the distance of a row from its behaviour policy, for very
stale data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from relax_hpc.algorithms.base import CorrectionConfig
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses


@dataclass(kw_only=True)
class M2po(Grpo):
    """Second-moment trust policy optimization, arXiv 2510.01161, with GRPO's advantages.

    The ratio is policy / rollout, to the policy that sampled the token, so there is no further
    correction and no old policy. The clip can affect tokens with A > 0 and r > 1, or A < 0 and r <
    1. The mean of log(r)^2 over these tokens has a budget: each value is limited to t^2, such that
    the mean equals the budget. PPO's clip uses the bounds e^-t and e^t, or 1 - clip_low and 1 +
    clip_high if those are wider. A row within the budget is not clipped at all.

    The paper takes the mean over a batch. Here rows are trained as they arrive, so the batch is not
    known before its first gradient. The mean is therefore over a row, and does not depend on
    micro-batches and ranks. Algorithm 1 of the paper removes tokens until the mean of the remaining
    tokens is within the budget. Here, as in the authors' code, such tokens are limited and still
    count.
    """

    uses_old: ClassVar[bool] = False
    ratio_to_rollout: ClassVar[bool] = True

    name: str = "m2po"
    budget: float = bounded(0.04, 0.0)
    """Largest mean of log(policy / rollout)^2, in nats^2, over those tokens of a row that a clip
    can affect."""
    clip_low: float = bounded(0.3, 0.0, 1.0)
    """The lower clip bound of the ratio is at most 1 - clip_low."""
    clip_high: float = bounded(0.5, 0.0)
    """The upper clip bound of the ratio is at least 1 + clip_high."""
    correction: CorrectionConfig = field(default_factory=lambda: CorrectionConfig(kind="off"))

    def findings(self) -> Iterator[str]:
        yield from super().findings()
        if self.correction.kind != "off":
            yield (
                f"correction.kind: found {self.correction.kind} with m2po, allowed: off; m2po uses "
                "the ratio to the rollout policy"
            )

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.kl import safe_exp
        from relax_hpc.algorithms.losses import TokenLosses, clipped_surrogate

        log_ratio = batch.logprobs - batch.rollout_logprobs
        ratio = safe_exp(log_ratio)
        distance = log_ratio.detach()
        clippable = (batch.mask > 0) & (distance * batch.advantages > 0)
        bound = _limit_for_mean(distance.square(), clippable, self.budget).sqrt()
        low = (1.0 - (-bound).exp()).clamp(min=self.clip_low)
        high = (bound.exp() - 1.0).clamp(min=self.clip_high)
        loss, clipped = clipped_surrogate(ratio, batch.advantages, low, high)
        return TokenLosses(loss, ratio, clipped, {"second_moment": distance.square() * clippable})


def _limit_for_mean(values: Tensor, chosen: Tensor, budget: float) -> Tensor:
    """Return the limit [b, 1] for which the mean of the ``chosen`` of each row of ``values`` [b,
    s], each at most the limit, is ``budget``; infinite if the mean is not above it without a
    limit."""
    import torch

    count = chosen.sum(dim=1, keepdim=True)
    index = torch.arange(values.shape[1], device=values.device)
    rising = values.where(chosen, torch.inf).sort(dim=1).values
    rising = rising.where(index < count, 0.0)
    # If the k smallest values keep their value, the n - k larger ones share the remaining budget.
    smaller_sum = rising.cumsum(dim=1) - rising
    larger_count = count - index
    is_limited = (larger_count > 0) & (rising * larger_count + smaller_sum > budget * count)
    limit = (budget * count - smaller_sum) / larger_count.clamp(min=1)
    limit = limit.where(is_limited, -torch.inf).amax(dim=1, keepdim=True)
    return limit.where(is_limited.any(dim=1, keepdim=True), torch.inf)
