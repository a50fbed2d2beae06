"""GSPO: one ratio, and one clip decision, for a whole response."""

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

    The ratio of every token is s = exp(mean over the response of log(policy / old)) (equation 7).
    The clip bounds are narrow, because means over many tokens are near 1 (section 5.1: 3e-4 and
    4e-4). The gradient is taken token by token (GSPO-token, equation 13): s_t = sg[s] policy_t /
    sg[policy_t]. If all tokens of a row have the same advantage and the same weight by
    `correction`, this is the gradient of s itself. With correction.level token each token has its
    own weight w_t, and the gradient is the gradient of mean(w_t s_t), not of w s.

    A response here is a *row*, and an episode may have several rows. The paper's likelihood is that
    of one sequence given its context, and a row was sampled in one context. Each row of an episode
    has its own ratio, and the mean of the episode weights rows by their tokens.
    """

    name: str = "gspo"
    clip_low: float = bounded(3e-4, 0.0, 1.0)
    """The lower clip bound of a row's ratio is 1 - clip_low."""
    clip_high: float = bounded(4e-4, 0.0)
    """The upper clip bound of a row's ratio is 1 + clip_high."""
    reduction: Reduction = "sequence_mean"
    """Average of the loss over an optimizer step; options as in all algorithms.

    The paper takes the mean over sequences.
    """

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.kl import safe_exp
        from relax_hpc.algorithms.losses import TokenLosses, clipped_surrogate

        keep = (batch.mask > 0).to(batch.logprobs.dtype)
        log_ratio = (batch.logprobs - batch.old_logprobs).detach() * keep
        mean = log_ratio.sum(dim=1, keepdim=True) / batch.row_tokens().clamp(min=1.0)
        ratio = safe_exp(mean + batch.logprobs - batch.logprobs.detach())
        loss, clipped = clipped_surrogate(ratio, batch.advantages, self.clip_low, self.clip_high)
        return TokenLosses(loss, ratio, clipped)
