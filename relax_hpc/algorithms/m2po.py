"""M2PO: a clip whose edges follow from how far a response is off its behaviour policy, for data
that are very stale."""

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

    The ratio is policy / rollout, to whoever drew the token, so that there is no further correction
    and no old policy. Of the tokens that a clip can hold (A > 0 and r > 1, or A < 0 and r < 1) the
    mean of log(r)^2 has a budget: each is cut at t^2, such that the mean is what the budget allows,
    and PPO's clip takes e^-t and e^t for edges, or 1 - clip_low and 1 + clip_high if those are
    further out. What keeps within the budget is not clipped at all.

    The paper takes the mean over a batch, which nobody has before its first gradient where rows are
    trained as they come; here it is over a row, so that micro-batches and ranks make no difference.
    Its algorithm 1 takes tokens out until the mean of the others is within the budget; that they
    are cut, and count, is as in the authors' code.
    """

    uses_old: ClassVar[bool] = False
    ratio_to_rollout: ClassVar[bool] = True

    name: str = "m2po"
    budget: float = bounded(0.04, 0.0)
    """Largest mean of log(policy / rollout)^2, nats^2, over a row's tokens that a clip can hold."""
    clip_low: float = bounded(0.3, 0.0, 1.0)
    """Lower edge of the ratio is at most 1 - clip_low."""
    clip_high: float = bounded(0.5, 0.0)
    """Upper edge of the ratio is at least 1 + clip_high."""
    correction: CorrectionConfig = field(default_factory=lambda: CorrectionConfig(kind="off"))

    def findings(self) -> Iterator[str]:
        yield from super().findings()
        if self.correction.kind != "off":
            yield (
                f"correction.kind: found {self.correction.kind} with m2po, allowed: off; its "
                "ratio is to rollout's"
            )

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.kl import safe_exp
        from relax_hpc.algorithms.losses import TokenLosses, clipped_surrogate

        log_ratio = batch.logprobs - batch.rollout_logprobs
        ratio, far = safe_exp(log_ratio), log_ratio.detach()
        holds = (batch.mask > 0) & (far * batch.advantages > 0)
        edge = _largest(far.square(), holds, self.budget).sqrt()
        low, high = (
            (1.0 - (-edge).exp()).clamp(min=self.clip_low),
            (edge.exp() - 1.0).clamp(min=self.clip_high),
        )
        loss, clipped = clipped_surrogate(ratio, batch.advantages, low, high)
        return TokenLosses(loss, ratio, clipped, {"second_moment": far.square() * holds})


def _largest(values: Tensor, chosen: Tensor, budget: float) -> Tensor:
    """Edge [b, 1] at which the ``chosen`` of each row of ``values`` [b, s] are cut for their mean
    to be ``budget``; infinite where it is no more anyway."""
    import torch

    count, places = (
        chosen.sum(dim=1, keepdim=True),
        torch.arange(values.shape[1], device=values.device),
    )
    rising = values.where(chosen, torch.inf).sort(dim=1).values
    rising = rising.where(places < count, 0.0)
    # With the k smallest as they are, the n - k others share what these leave of the whole.
    before, left = rising.cumsum(dim=1) - rising, count - places
    spent = (left > 0) & (rising * left + before > budget * count)
    share = (budget * count - before) / left.clamp(min=1)
    edge = share.where(spent, -torch.inf).amax(dim=1, keepdim=True)
    return edge.where(spent.any(dim=1, keepdim=True), torch.inf)
