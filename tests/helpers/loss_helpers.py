"""Losses of one row of tokens, and their gradients, for tests of algorithms."""

from __future__ import annotations

import torch

from relax_hpc.algorithms import (
    Algorithm,
)
from relax_hpc.algorithms.batch import TokenBatch


def one_row(advantage: float, logprobs: list[float], old: list[float]) -> TokenBatch:
    """A row of trained tokens, [1, tokens], in float64.

    The rollout probabilities equal the old ones.
    """
    policy_logprobs, old_logprobs = (
        torch.tensor([values], dtype=torch.float64) for values in (logprobs, old)
    )
    return TokenBatch(
        logprobs=policy_logprobs.requires_grad_(),
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs,
        advantages=torch.full_like(old_logprobs, advantage),
        mask=torch.ones_like(old_logprobs),
    )


def loss_and_gradient(
    algorithm: Algorithm, batch: TokenBatch
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient by the log-probabilities of the first row, and metrics."""
    loss, metrics = algorithm.loss(batch)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    return (
        loss.item(),
        gradient[0].tolist(),
        {name: value.item() for name, value in metrics.items()},
    )
