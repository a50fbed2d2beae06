"""Divergences of two distributions over the same events: a teacher's most likely tokens, and all
other tokens as one event.

Distributions are log-probabilities [..., events], in nats, whose probabilities sum to 1. Results
are sums over the events.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MIN_OTHER = 1e-6
"""Smallest probability of the other tokens together. Below it float32 cannot represent 1 minus the
sum."""


def with_rest(logprobs: Tensor) -> Tensor:
    """Return log-probabilities [..., k + 1] of k tokens, [..., k], and of all other tokens
    together.

    This is a coarser view of a distribution: the divergence of two coarse views is at most the
    divergence of the whole distributions, and 0 if they are equal. Probabilities that are
    renormalized over the k tokens would ignore what a policy gives to other tokens, and entropies
    grow by that: TA-OPD, arXiv 2608.14728; SDPO, arXiv 2601.20802, also uses the other tokens.
    """
    import torch

    other = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=MIN_OTHER)
    return torch.cat([logprobs, other.log()], -1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q)."""
    return (p.exp() * (p - q)).sum(-1)


def jensen_shannon(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence, with 0 < ``beta`` < 1: beta KL(teacher ||
    m) + (1 - beta) KL(policy || m) with m = beta teacher + (1 - beta) policy; GKD, arXiv
    2306.13649, section 2.

    Divided by beta it tends to KL(teacher || policy) for beta -> 0. Divided by 1 - beta it tends to
    KL(policy || teacher) for beta -> 1.
    """
    import torch

    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1.0 - beta) * kl(policy, mixture)
