"""Importance weights for tokens that another policy sampled than the policy that is trained.

The two policies differ because weights are stale, and because an engine computes probabilities in a
different way than the trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_hpc.algorithms.kl import safe_exp

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.base import CorrectionConfig


@dataclass(slots=True)
class Correction:
    """Off-policy correction of each token [b, s], without gradient."""

    weight: Tensor
    """Factor of the token's policy loss."""
    cut: Tensor
    """True where the weight is not the ratio, because it was truncated or masked."""
    ratio: Tensor
    """Ratio old / rollout of the token's probabilities, or of the probabilities of its whole
    row."""


def correction(
    old_logprobs: Tensor, rollout_logprobs: Tensor, settings: CorrectionConfig
) -> Correction:
    """Return weights from the ratio rho = exp(old - rollout) of log-probabilities [b, s]. Both must
    be 0 for tokens that do not count.

    Level `token`: rho of each token. It has a low variance, but ignores the effect of a token on
    later tokens. Level `sequence`: the product over the row, rho = exp(sum(old - rollout)), the
    unbiased weight of a row, which was sampled in one context (Y. Liu, J. Li et al., "When Speed
    Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", 2025, section
    4.2.1). GSPO's geometric mean (arXiv 2507.18071, equation 7) does not correct an expectation.
    With distant policies, ratios of long responses leave the range soon. The logarithm is summed
    first, then limited to `kl.MAX_LOG_RATIO`.

    `truncate`: w = min(rho, high); E. Ionides, "Truncated Importance Sampling", J. Comput. Graph.
    Stat. 17(2), 2008; for rollout engines F. Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training", 2025. There is no lower bound: a small weight does no harm.
    `mask`: w = rho if low <= rho <= high, else 0; IcePop, arXiv 2510.18855, for tokens, and Liu, Li
    et al. for responses. A rho that is NaN is masked. `off`: w = 1.

    Masked tokens still count in the denominator of the mean, as in the objectives of both papers:
    the estimate is of E[w 1(inside) loss] over all sampled tokens. Some frameworks exclude them.
    The steps of the remaining tokens, of the KL and of the entropy then grow with the number of
    masked tokens.
    """
    log_ratio = old_logprobs.detach() - rollout_logprobs.detach()
    if settings.level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    ratio = safe_exp(log_ratio)
    if settings.kind == "off":
        return Correction(ratio.new_ones(ratio.shape), ratio > math.inf, ratio)
    if settings.kind == "truncate":
        return Correction(ratio.clamp(max=settings.high), ratio > settings.high, ratio)
    inside = (ratio >= settings.low) & (ratio <= settings.high)
    return Correction(ratio.where(inside, 0.0), ~inside, ratio)


def effective_share(weight: float, square: float) -> float:
    """Return the effective sample size as a share, (sum w)^2 / (n sum w^2), from the means of w and
    w^2; 0 if all weights are 0.

    A. Kong, "A Note on Importance Sampling Using Standardized Weights", 1992.

    >>> effective_share(1.0, 1.0), effective_share(0.5, 0.5)
    (1.0, 0.5)
    """
    return weight**2 / square if square > 0 else 0.0
