"""Parts of losses: the clipped surrogate, off-policy correction, KL to the reference, entropy
bonus.

Losses and metrics are *sums*. Micro-batches and ranks are added, and the trainer divides once per
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
    from relax_hpc.algorithms.correction import Correction

MAX_SUFFIX = "_max"
"""Metrics with this suffix are maxima and are combined by max. All others are sums."""
PER_WEIGHT = ("loss/", "preference/")
"""Prefixes of the names of sums that are divided by the weight of the loss. Other sums are divided
by the number of tokens."""
OWN = "algorithm/"
"""Prefix of the names of metrics that only one algorithm has."""


@dataclass(slots=True)
class TokenLosses:
    """The policy's loss of each token, without correction, KL and entropy; every tensor is [b,
    s]."""

    loss: Tensor
    """Loss of each token, with gradient."""
    ratio: Tensor
    """Ratio policy / old, as the algorithm defines it."""
    clipped: Tensor
    """True where the clip determines the loss."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Further metrics by name: values of tokens, logged as means over trained tokens. They appear
    as algorithm/<name>."""
    divergence: Tensor | None = None
    """Further loss of each token, with gradient, from the whole distribution at the token. It does
    not depend on the sampled token, so no correction weights it."""


def ratio_to_old(batch: TokenBatch) -> Tensor:
    """Return policy / old of each token, with gradient."""
    return safe_exp(batch.logprobs - batch.old_logprobs)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return token losses max(-A r, -A clip(r, 1 - low, 1 + high)), and where the clipped term is
    the larger one, both of r's shape. ``low`` and ``high`` are numbers or broadcast to r's
    shape."""
    free = -advantages * ratio
    # torch's types lack bounds that are numbers or tensors.
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)  # type: ignore[arg-type]
    return free.maximum(clipped), clipped > free


def token_shares(batch: TokenBatch, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weight of each token [b, s] in the summed loss, as `algorithm.reduction` defines
    it (see `policy_loss`), and the counts `tokens`, `episodes` and `weight`. The sum over an
    optimizer step is divided by `weight`."""
    share = (batch.mask > 0).to(batch.logprobs.dtype)
    episode_tokens = batch.episode_token_counts()
    tokens = share.sum()
    episodes = (batch.row_tokens() / episode_tokens).sum()
    if algorithm.reduction == "sequence_mean":
        share = share / episode_tokens
    elif algorithm.reduction == "constant":
        share = share / algorithm.constant_tokens
    weight = tokens if algorithm.reduction == "token_mean" else episodes
    return share, {"weight": weight, "tokens": tokens, "episodes": episodes}


def policy_loss(batch: TokenBatch, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of ``algorithm`` *summed* over ``batch`` (a scalar with gradient), and
    detached scalar sums to log.

    A token's loss is w * algorithm.token_losses + its divergence, if it has one, + kl.coefficient *
    KL - entropy_coefficient * H, with w from `correction`. The mean over an optimizer step is
    sum(loss) / sum(metrics["weight"]). Reductions:

    - `token_mean` sums over tokens. Every token has the same weight (DAPO, arXiv 2503.14476,
      section 3.3; also Dr. GRPO, arXiv 2503.20783, section 3).
    - `sequence_mean` first divides the sum of an episode by the number of its trained tokens (GRPO,
      arXiv 2402.03300, equation 3). Tokens of all rows of the episode count, also of rows in other
      batches.
    - `constant` divides it by `constant_tokens` (Dr. GRPO, section 3.2). The weight of a token does
      not depend on the length of its episode.

    Counts: `weight` (trained tokens, or episodes with trained tokens; a row counts as the share of
    its episode's tokens that it has), `tokens`, `episodes`. Terms: `loss/policy`, `loss/kl`,
    `loss/entropy` and `loss/divergence`, whose sum is the loss. Sums over trained tokens: see
    `_token_metrics`. Maxima: `train_rollout_logprob_max`, `rollout_ratio_max` and
    `rollout_inverse_ratio_max`, the inverse of the smallest ratio. `mean_metrics` turns totals into
    means.

    ValueError: shapes differ, or a coefficient is set whose input is missing.
    """
    keep = batch.mask > 0
    x = _checked(batch, algorithm)
    share, counts = token_shares(x, algorithm)
    losses = algorithm.token_losses(x)
    corrected = correction(x.old_logprobs, x.rollout_logprobs, algorithm.correction)
    terms = {"loss/policy": (share * corrected.weight * losses.loss).sum()}
    kl = None
    if x.ref_logprobs is not None:
        kl = KL_ESTIMATORS[algorithm.kl.estimator](x.ref_logprobs, x.logprobs)
    terms["loss/kl"] = _scaled(algorithm.kl.coefficient, share, _kl_of_loss(kl, x, algorithm.kl))
    terms["loss/entropy"] = _scaled(-algorithm.entropy_coefficient, share, x.entropy)
    loss = terms["loss/policy"] + terms["loss/kl"] + terms["loss/entropy"]
    if losses.divergence is not None:
        terms["loss/divergence"] = (share * losses.divergence).sum()
        loss = loss + terms["loss/divergence"]

    metrics = counts | terms
    for name, value in _token_metrics(x, algorithm, losses, corrected, kl).items():
        if value is not None:
            metrics[name] = (keep * value).sum()
    maxima = {
        "train_rollout_logprob": (x.old_logprobs - x.rollout_logprobs).abs(),
        "rollout_ratio": corrected.ratio,
        "rollout_inverse_ratio": 1.0 / corrected.ratio,
    }
    metrics |= {name + MAX_SUFFIX: (keep * value).max() for name, value in maxima.items()}
    return loss, {name: value.detach().to(share.dtype) for name, value in metrics.items()}


def _token_metrics(
    x: TokenBatch,
    algorithm: Algorithm,
    losses: TokenLosses,
    corrected: Correction,
    kl: Tensor | None,
) -> dict[str, Tensor | None]:
    """Return values of tokens [b, s] to log, by name; None if the batch lacks the input.

    `sampled_entropy` estimates the entropy of the engine's policy from the sampled tokens;
    `rollout_kl` is KL of the engine's policy to the old one; `correction_square` is the square of
    the correction's weight.
    """
    learns_from_advantages = x.advantages is not None and algorithm.has_advantages
    values = {
        "ratio": losses.ratio,
        "clip_fraction": losses.clipped,
        "kl/reference": kl,
        "kl/old": k3(x.logprobs, x.old_logprobs),
        "entropy": x.entropy,
        "sampled_entropy": -x.rollout_logprobs,
        "zero_advantage": x.advantages == 0 if learns_from_advantages else None,
        "rollout_kl": k3(x.old_logprobs, x.rollout_logprobs),
        "correction_weight": corrected.weight,
        "correction_square": corrected.weight.square(),
        "correction_cut": corrected.cut,
        "train_rollout_logprob_abs_diff": (x.old_logprobs - x.rollout_logprobs).abs(),
    }
    return values | {OWN + name: value for name, value in losses.metrics.items()}


def mean_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Return means of the combined metrics of a loss. Sums are divided by the weight if the name
    begins with an entry of `PER_WEIGHT`, otherwise by the tokens. Counts and maxima do not change.

    >>> totals = {"weight": 2.0, "tokens": 4.0, "episodes": 2.0, "loss/policy": 3.0, "ratio": 5.0}
    >>> mean_metrics(totals)
    {'weight': 2.0, 'tokens': 4.0, 'episodes': 2.0, 'loss/policy': 1.5, 'ratio': 1.25}
    """
    means = {}
    for name, value in totals.items():
        if name in ("weight", "tokens", "episodes") or name.endswith(MAX_SUFFIX):
            means[name] = value
        else:
            divisor = totals["weight" if name.startswith(PER_WEIGHT) else "tokens"]
            means[name] = value / max(divisor, 1.0)
    return means


def _checked(batch: TokenBatch, algorithm: Algorithm) -> TokenBatch:
    """Return `batch` with zeros where the mask is 0. They are set before any exp, so that neither
    values nor gradients become NaN."""
    if algorithm.kl.coefficient and batch.ref_logprobs is None:
        raise ValueError("algorithm.kl.coefficient is set but the batch has no ref_logprobs")
    if algorithm.entropy_coefficient and batch.entropy is None:
        raise ValueError("algorithm.entropy_coefficient is set but the batch has no entropy")
    return batch.clean()


def _kl_of_loss(kl: Tensor | None, x: TokenBatch, settings: KlConfig) -> Tensor | None:
    """Return the divergences ``kl`` [b, s] as the loss uses them: limited to `cap`, and weighted if
    `importance` is set.

    The weight is policy / rollout with its gradient. The expectation over the tokens that the
    engine samples is then the expectation over the policy. The weight of the correction cannot be
    used: it is bounded, and 0 outside of a mask, or 1.
    """
    if kl is None or not settings.coefficient:
        return kl
    capped = kl.clamp(-settings.cap, settings.cap) if settings.cap else kl
    if not settings.importance:
        return capped
    return capped * safe_exp(x.logprobs - x.rollout_logprobs)


def _scaled(coefficient: float, share: Tensor, value: Tensor | None) -> Tensor:
    """Return coefficient * sum(share * value), and exactly 0 if the coefficient is 0, so that no
    inf of an unused term reaches the loss."""
    if coefficient == 0 or value is None:
        return share.new_zeros(())
    return coefficient * (share * value).sum()
