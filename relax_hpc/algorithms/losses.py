"""The policy loss: clipped surrogate, off-policy correction, KL to the reference, entropy bonus.

Losses and metrics are *sums*, so that micro-batches and ranks add up and the trainer divides once a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.algorithms.correction import correction
from relax_hpc.algorithms.kl import KL_ESTIMATORS, k3, safe_exp
from relax_hpc.config.schema import AlgorithmConfig

MAX_SUFFIX = "_max"
"""Metrics with this suffix are maxima and combine by max; all others are sums."""


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Token losses max(-A r, -A clip(r, 1 - low, 1 + high)) and where the clipped branch holds, both of r's shape.

    PPO, arXiv 1707.06347, equation 7, with GRPO's group advantages, arXiv 2402.03300, equation 3; two edges
    ("clip-higher") from DAPO, arXiv 2503.14476, section 3.1.
    """
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, clipped), clipped > free


def policy_loss(batch: TokenBatch, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss *summed* over `batch` (a scalar with gradient), and detached scalar sums to log.

    A token's loss is w * max(-A r, -A clip(r)) + kl_coefficient * KL - entropy_coefficient * H, with
    r = exp(logprobs - old_logprobs) and w from `correction`. `token_mean` adds up tokens (DAPO, arXiv
    2503.14476, section 3.3; every token weighs the same, which Dr. GRPO, arXiv 2503.20783, section 3, asks for
    too); `sequence_mean` first divides a sample's sum by its masked tokens (GRPO, arXiv 2402.03300,
    equation 3) and so needs whole samples. The mean over an optimizer step is sum(loss) / sum(metrics["weight"]).

    Metrics: `weight` (masked tokens, or samples having some), `tokens`, `samples`; `loss/policy`, `loss/kl`,
    `loss/entropy`, whose sum is the loss; over masked tokens `ratio`, `clip_fraction`, `kl/old`, `rollout_kl` (KL of
    the engine's policy to the old one), `correction_weight`, `correction_square` (of the weight), `correction_cut`,
    `train_rollout_logprob_abs_diff`, `kl/reference` if there are ref_logprobs and `entropy` if there is entropy; and
    the maxima `train_rollout_logprob_max`, `rollout_ratio_max` and `rollout_inverse_ratio_max`, the least ratio being
    its inverse. `mean_metrics` turns their totals into means.

    ValueError: shapes differ, or a coefficient is set whose input is missing.
    """
    keep = batch.mask > 0
    x = _checked(batch, config, keep)
    share = keep.to(x.logprobs.dtype)
    if config.reduction == "sequence_mean":
        share = share / share.sum(dim=1, keepdim=True).clamp(min=1.0)
    ratio = safe_exp(x.logprobs - x.old_logprobs)
    surrogate, clipped = clipped_surrogate(ratio, x.advantages, config.clip_low, config.clip_high)
    corrected = correction(x.old_logprobs, x.rollout_logprobs, config)
    terms = {"loss/policy": (share * corrected.weight * surrogate).sum()}
    kl = None if x.ref_logprobs is None else KL_ESTIMATORS[config.kl_estimator](x.ref_logprobs, x.logprobs)
    terms["loss/kl"] = _scaled(config.kl_coefficient, share, kl)
    terms["loss/entropy"] = _scaled(-config.entropy_coefficient, share, x.entropy)
    loss = terms["loss/policy"] + terms["loss/kl"] + terms["loss/entropy"]

    tokens = keep.sum().to(share.dtype)
    samples = keep.any(dim=1).sum().to(share.dtype)
    difference = (x.old_logprobs - x.rollout_logprobs).abs()
    per_token = {
        "ratio": ratio,
        "clip_fraction": clipped,
        "kl/reference": kl,
        "kl/old": k3(x.logprobs, x.old_logprobs),
        "entropy": x.entropy,
        "rollout_kl": k3(x.old_logprobs, x.rollout_logprobs),
        "correction_weight": corrected.weight,
        "correction_square": corrected.weight.square(),
        "correction_cut": corrected.cut,
        "train_rollout_logprob_abs_diff": difference,
    }
    metrics = {"weight": tokens if config.reduction == "token_mean" else samples, "tokens": tokens, "samples": samples}
    metrics |= terms
    metrics |= {name: (keep * value).sum() for name, value in per_token.items() if value is not None}
    maxima = {
        "train_rollout_logprob": difference,
        "rollout_ratio": corrected.ratio,
        "rollout_inverse_ratio": 1.0 / corrected.ratio,
    }
    metrics |= {name + MAX_SUFFIX: (keep * value).max() for name, value in maxima.items()}
    return loss, {name: value.detach().to(share.dtype) for name, value in metrics.items()}


def mean_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Means of combined `policy_loss` metrics: `loss/*` per weight, other sums per token; counts and maxima stay.

    >>> mean_metrics({"weight": 2.0, "tokens": 4.0, "samples": 2.0, "loss/policy": 3.0, "ratio": 5.0})
    {'weight': 2.0, 'tokens': 4.0, 'samples': 2.0, 'loss/policy': 1.5, 'ratio': 1.25}
    """
    result = {}
    for name, value in totals.items():
        if name in ("weight", "tokens", "samples") or name.endswith(MAX_SUFFIX):
            result[name] = value
        else:
            result[name] = value / max(totals["weight" if name.startswith("loss/") else "tokens"], 1.0)
    return result


def _checked(batch: TokenBatch, config: AlgorithmConfig, keep: Tensor) -> TokenBatch:
    """`batch` with zeros where not kept, put there before any exp so that neither values nor gradients turn NaN."""
    if config.kl_coefficient and batch.ref_logprobs is None:
        raise ValueError("algorithm.kl_coefficient is set but the batch has no ref_logprobs")
    if config.entropy_coefficient and batch.entropy is None:
        raise ValueError("algorithm.entropy_coefficient is set but the batch has no entropy")
    return batch.clean()


def _scaled(coefficient: float, share: Tensor, value: Tensor | None) -> Tensor:
    """coefficient * sum(share * value); exactly 0 when the term is off, so that no inf of it can reach the loss."""
    if coefficient == 0 or value is None:
        return share.new_zeros(())
    return coefficient * (share * value).sum()
