"""Parts of losses: the surrogate's ratio and clip, off-policy correction, KL to the reference,
entropy bonus.

Losses and metrics are *sums*, so that micro-batches and ranks add up and the trainer divides once a
step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relax_hpc.algorithms.correction import correction
from relax_hpc.algorithms.kl import KL_ESTIMATORS, k3, safe_exp

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.base import Algorithm, KlConfig
    from relax_hpc.algorithms.batch import TokenBatch

MAX_SUFFIX = "_max"
"""Metrics with this suffix are maxima and combine by max; all others are sums."""
PER_WEIGHT = ("loss/", "preference/")
"""Beginnings of the names of sums whose means are over what the loss is a mean over; of others,
over tokens."""
OWN = "algorithm/"
"""Beginning of the names of metrics that one algorithm alone has."""


@dataclass(slots=True)
class TokenLosses:
    """The policy's loss of each token, without correction, KL and entropy; everything [b, s]."""

    loss: Tensor
    """Loss of each token, with gradient."""
    ratio: Tensor
    """Ratio policy / old, as the algorithm takes it."""
    clipped: Tensor
    """True where the clip decides."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Further metrics, as means over trained tokens: name -> values. They appear as
    algorithm/<name>."""
    divergence: Tensor | None = None
    """Further loss of each token, with gradient, by the whole distribution that it was drawn from:
    whoever drew it, no correction weighs it."""


def ratio_to_old(batch: TokenBatch) -> Tensor:
    """policy / old of each token, with gradient."""
    return safe_exp(batch.logprobs - batch.old_logprobs)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Token losses max(-A r, -A clip(r, 1 - low, 1 + high)) and where the clipped branch holds,
    both of r's shape; the edges are the same for all, or of a shape that fits r's."""
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return free.maximum(clipped), clipped > free


def token_shares(batch: TokenBatch, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight of each token [b, s] in a loss that is summed as `algorithm.reduction` says, see
    `policy_loss`; and the counts `tokens`, `episodes` and `weight`, by which the sum over an
    optimizer step is divided."""
    share = (batch.mask > 0).to(batch.logprobs.dtype)
    tokens, episodes = share.sum(), (batch.row_tokens() / batch.of_episode()).sum()
    if algorithm.reduction == "sequence_mean":
        share = share / batch.of_episode()
    elif algorithm.reduction == "constant":
        share = share / algorithm.constant_tokens
    weight = tokens if algorithm.reduction == "token_mean" else episodes
    return share, {"weight": weight, "tokens": tokens, "episodes": episodes}


def policy_loss(batch: TokenBatch, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of ``algorithm`` *summed* over ``batch`` (a scalar with gradient), and detached
    scalar sums to log.

    A token's loss is w * algorithm.token_losses + its divergence, if it has one, + kl.coefficient *
    KL - entropy_coefficient * H with w from `correction`. `token_mean` adds up tokens (DAPO, arXiv
    2503.14476, section 3.3; every token weighs the same, which Dr. GRPO, arXiv 2503.20783, section
    3, asks for too); `sequence_mean` first divides an episode's sum by its masked tokens (GRPO,
    arXiv 2402.03300, equation 3), those of all its rows together, of which some may be in other
    batches; `constant` divides it by `constant_tokens` (Dr. GRPO, section 3.2: no episode's tokens
    weigh less for being many). The mean over an optimizer step is sum(loss) /
    sum(metrics["weight"]).

    Metrics: `weight` (masked tokens, or episodes having some: a row is as much of one as it has of
    its tokens), `tokens`, `episodes`; `loss/policy`, `loss/kl`, `loss/entropy` and
    `loss/divergence`, whose sum is the loss; over masked tokens `ratio`, `clip_fraction`, `kl/old`,
    `sampled_entropy` (of the engine's policy, by its own draws), `zero_advantage` if there are
    advantages, `rollout_kl` (KL of the engine's policy to the old one), `correction_weight`,
    `correction_square` (of the weight), `correction_cut`, `train_rollout_logprob_abs_diff`,
    `kl/reference` if there are ref_logprobs, `entropy` if there is entropy and algorithm/* of the
    algorithm's own; and the maxima `train_rollout_logprob_max`, `rollout_ratio_max` and
    `rollout_inverse_ratio_max`, the least ratio being its inverse. `mean_metrics` turns their
    totals into means.

    ValueError: shapes differ, or a coefficient is set whose input is missing.
    """
    keep = batch.mask > 0
    x = _checked(batch, algorithm)
    share, counts = token_shares(x, algorithm)
    found = algorithm.token_losses(x)
    corrected = correction(x.old_logprobs, x.rollout_logprobs, algorithm.correction)
    terms = {"loss/policy": (share * corrected.weight * found.loss).sum()}
    kl = (
        None
        if x.ref_logprobs is None
        else KL_ESTIMATORS[algorithm.kl.estimator](x.ref_logprobs, x.logprobs)
    )
    terms["loss/kl"] = _scaled(algorithm.kl.coefficient, share, _kl_of_loss(kl, x, algorithm.kl))
    terms["loss/entropy"] = _scaled(-algorithm.entropy_coefficient, share, x.entropy)
    loss = terms["loss/policy"] + terms["loss/kl"] + terms["loss/entropy"]
    if found.divergence is not None:
        terms["loss/divergence"] = (share * found.divergence).sum()
        loss = loss + terms["loss/divergence"]

    difference = (x.old_logprobs - x.rollout_logprobs).abs()
    no_advantages = x.advantages is None or not algorithm.has_advantages
    per_token = {
        "ratio": found.ratio,
        "clip_fraction": found.clipped,
        "kl/reference": kl,
        "kl/old": k3(x.logprobs, x.old_logprobs),
        "entropy": x.entropy,
        "sampled_entropy": -x.rollout_logprobs,
        "zero_advantage": None if no_advantages else x.advantages == 0,
        "rollout_kl": k3(x.old_logprobs, x.rollout_logprobs),
        "correction_weight": corrected.weight,
        "correction_square": corrected.weight.square(),
        "correction_cut": corrected.cut,
        "train_rollout_logprob_abs_diff": difference,
    } | {OWN + name: values for name, values in found.metrics.items()}
    metrics = counts | terms
    metrics |= {
        name: (keep * value).sum() for name, value in per_token.items() if value is not None
    }
    maxima = {
        "train_rollout_logprob": difference,
        "rollout_ratio": corrected.ratio,
        "rollout_inverse_ratio": 1.0 / corrected.ratio,
    }
    metrics |= {name + MAX_SUFFIX: (keep * value).max() for name, value in maxima.items()}
    return loss, {name: value.detach().to(share.dtype) for name, value in metrics.items()}


def mean_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Means of combined metrics of a loss: `PER_WEIGHT` per weight, other sums per token; counts
    and maxima stay.

    >>> mean_metrics({"weight": 2.0, "tokens": 4.0, "episodes": 2.0, "loss/policy": 3.0, "ratio":
    ...     5.0})
    {'weight': 2.0, 'tokens': 4.0, 'episodes': 2.0, 'loss/policy': 1.5, 'ratio': 1.25}
    """
    result = {}
    for name, value in totals.items():
        if name in ("weight", "tokens", "episodes") or name.endswith(MAX_SUFFIX):
            result[name] = value
        else:
            result[name] = value / max(
                totals["weight" if name.startswith(PER_WEIGHT) else "tokens"], 1.0
            )
    return result


def _checked(batch: TokenBatch, algorithm: Algorithm) -> TokenBatch:
    """`batch` with zeros where not kept, put there before any exp so that neither values nor
    gradients turn NaN."""
    if algorithm.kl.coefficient and batch.ref_logprobs is None:
        raise ValueError("algorithm.kl.coefficient is set but the batch has no ref_logprobs")
    if algorithm.entropy_coefficient and batch.entropy is None:
        raise ValueError("algorithm.entropy_coefficient is set but the batch has no entropy")
    return batch.clean()


def _kl_of_loss(kl: Tensor | None, x: TokenBatch, settings: KlConfig) -> Tensor | None:
    """Divergences ``kl`` [b, s] as the loss has them: capped, and weighed by importance if
    ``settings`` say so.

    The weight is policy / rollout with its gradient, so that the expectation over what the engine
    draws is that over the policy. The correction's weight does not serve: it is bounded, 0 outside
    of a mask, or 1.
    """
    if kl is None or not settings.coefficient:
        return kl
    capped = kl.clamp(-settings.cap, settings.cap) if settings.cap else kl
    return capped * safe_exp(x.logprobs - x.rollout_logprobs) if settings.importance else capped


def _scaled(coefficient: float, share: Tensor, value: Tensor | None) -> Tensor:
    """coefficient * sum(share * value); exactly 0 when the term is off, so that no inf of it can
    reach the loss."""
    if coefficient == 0 or value is None:
        return share.new_zeros(())
    return coefficient * (share * value).sum()
