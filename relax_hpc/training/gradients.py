"""Buffers of gradients, and the norm of a step's gradient.

megatron-core's own takes one kernel and one wait for the device for each parameter where neither
Transformer Engine nor Apex is installed, and others where one is: nothing here depends on what
happens to be importable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def gradient_buffers(module: Any) -> Iterator[Any]:
    """Buffers of the gradients of `module`, a megatron-core DistributedDataParallel."""
    yield from module.buffers
    yield from module.expert_parallel_buffers


def gradient_norm(optimizer: Any, device: torch.device) -> float:
    """L2 norm over the parameters of all ranks, each counted once; the device is waited for once.

    ``optimizer``: megatron-core's, whose main gradients are prepared. Collective over all ranks.
    """
    squares = [_squares(part, device) for part in optimizer.chained_optimizers]
    return math.sqrt(float(torch.stack(squares).sum()))


def _squares(part: Any, device: torch.device) -> torch.Tensor:
    """Sum of the squares of ``part``'s gradients over the ranks that share it: experts are shared
    by others than the rest."""
    norm = torch.nn.utils.get_total_norm(part.get_main_grads_for_grad_norm())
    square = norm.to(device, torch.float64).square()
    dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
    return square


def average_repeated_gradients(module: Any) -> None:
    """Make the gradients of `repeated` parameters, of which each tensor-parallel rank works out
    all, their mean: what a kernel adds in an order of its own would let the ranks' weights drift
    apart.

    ``module``: megatron-core's DistributedDataParallel, whose gradients are reduced. Collective
    over tensor ranks.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    gradients = [
        one.main_grad
        for one in module.parameters()
        if one.requires_grad and getattr(one, "repeated", False)
    ]
    if group.size() == 1 or not gradients:
        return
    together = torch.cat([one.flatten() for one in gradients])
    # gloo has no mean.
    dist.all_reduce(together, group=group)
    together /= group.size()
    for one, mean in zip(
        gradients, together.split([one.numel() for one in gradients]), strict=True
    ):
        one.copy_(mean.view_as(one))


def clip_factor(norm: float, limit: float) -> float:
    """Factor by which gradients of ``norm`` are multiplied to have a norm of ``limit`` at most; 0:
    no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
