"""GSPO: one ratio, and one decision to clip, for a whole response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_hpc.algorithms.base import Reduction
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses


@dataclass(kw_only=True)
class Gspo(Grpo):
    """Group sequence policy optimization, arXiv 2507.18071, with GRPO's advantages.

    The ratio of every token is s = exp(mean over the response of log(policy / old)) (equation 7),
    and what it is clipped at is small, as means of many tokens are near 1 (section 5.1: 3e-4 and
    4e-4). Its gradient is taken token by token (GSPO-token, equation 13): s_t = sg[s] policy_t /
    sg[policy_t]. If all tokens of a row have the same advantage and the same weight by
    `correction`, that is the gradient of s itself. With correction.level token each token has its
    own weight w_t, and the gradient is that of mean(w_t s_t), not of w s.

    A response here is a *row*, of which an episode may have several: the paper's likelihood is that
    of one sequence given what came before it, and a row is what was drawn in one context. Rows of
    an episode have ratios of their own, and weigh by their tokens in its mean.
    """

    name: str = "gspo"
    clip_low: float = bounded(3e-4, 0.0, 1.0)
    """Lower edge of a row's ratio is 1 - clip_low."""
    clip_high: float = bounded(4e-4, 0.0)
    """Upper edge of a row's ratio is 1 + clip_high."""
    reduction: Reduction = "sequence_mean"
    """Mean that the loss is over an optimizer step, as in all algorithms; in the paper, over
    sequences."""

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.kl import safe_exp
        from relax_hpc.algorithms.losses import TokenLosses, clipped_surrogate

        keep = (batch.mask > 0).to(batch.logprobs.dtype)
        log_ratio = (batch.logprobs - batch.old_logprobs).detach() * keep
        mean = log_ratio.sum(dim=1, keepdim=True) / batch.row_tokens().clamp(min=1.0)
        ratio = safe_exp(mean + batch.logprobs - batch.logprobs.detach())
        loss, clipped = clipped_surrogate(ratio, batch.advantages, self.clip_low, self.clip_high)
        return TokenLosses(loss, ratio, clipped)
