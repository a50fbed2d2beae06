"""Estimators of a Kullback-Leibler divergence from log-probabilities of sampled tokens.

For x sampled from q and d = log p(x) - log q(x), each function estimates KL(q || p). Source: J.
Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html, which names
the estimators k1, k2 and k3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this value before exp: e^20 is beyond every clip bound and cap, and
sums of such values are finite in float32."""


def safe_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of `log_ratio` (any shape, nats), limited to [-MAX_LOG_RATIO, MAX_LOG_RATIO]."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return -d: unbiased, high variance, either sign. Its gradient has mean 0, so it is no
    loss."""
    return log_q - log_p


def k2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return d^2 / 2: biased, low variance. Its gradient through log_q is an unbiased gradient of
    KL(q || p)."""
    return 0.5 * (log_p - log_q).square()


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return e^d - 1 - d: unbiased and never negative; the estimator of GRPO (arXiv 2402.03300,
    equation 4).

    Its gradient through log_q is, in expectation, the gradient of KL(p || q), not of KL(q || p).
    """
    return safe_exp(log_p - log_q) - 1.0 - (log_p - log_q)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Functions of (log p, log q) by the name in `KlConfig.estimator`. They work elementwise on tensors
of the same shape, in nats."""
