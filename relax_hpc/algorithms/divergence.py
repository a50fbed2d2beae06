"""Divergences of two distributions over the same events: over a teacher's likeliest tokens, and all
others as one.

Distributions are log-probabilities [..., events], nats, that add up to 1; what is given is summed
over the events.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LEAST_REST = 1e-6
"""Least probability of the other tokens together: below it float32 has nothing of 1 minus the
sum."""


def with_rest(logprobs: Tensor) -> Tensor:
    """Log-probabilities [..., k + 1] of k tokens, [..., k], and of all others together.

    A coarser view of a distribution: a divergence between two of them is never more than that of
    the whole ones, and 0 for equal ones. Renormalised over the k alone it would not see what a
    policy gives to other tokens, and entropies grow by that: TA-OPD, arXiv 2608.14728; so it is in
    SDPO too, arXiv 2601.20802.
    """
    import torch

    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
    return torch.cat([logprobs, rest.log()], -1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q)."""
    return (p.exp() * (p - q)).sum(-1)


def jensen_shannon(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence: beta KL(teacher || m) + (1 - beta) KL(policy || m)
    with m = beta teacher + (1 - beta) policy, 0 < ``beta`` < 1; GKD, arXiv 2306.13649, section 2.

    Divided by beta it is KL(teacher || policy) at a beta of 0; by 1 - beta, KL(policy || teacher)
    at 1.
    """
    import torch

    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1.0 - beta) * kl(policy, mixture)
