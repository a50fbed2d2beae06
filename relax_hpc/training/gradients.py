"""Buffers of gradients, and the norm of a step's gradient.

megatron-core 0.16.1 computes the norm by different kernels if Transformer Engine or Apex is
installed. Without them it needs one kernel and one synchronization per parameter. This module does
not depend on installed packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def gradient_buffers(module: Any) -> Iterator[Any]:
    """Buffers of the gradients of `module`, a megatron-core DistributedDataParallel."""
    yield from module.buffers
    yield from module.expert_parallel_buffers


def squared_gradient_norm(optimizer: Any, device: torch.device) -> torch.Tensor:
    """Square of the L2 norm over the parameters of all ranks, each counted once: [] float64 on
    ``device``. The host does not wait.

    ``optimizer``: megatron-core's, with prepared main gradients. Collective over all ranks.
    """
    squares = [_squared_norm(part, device) for part in optimizer.chained_optimizers]
    return torch.stack(squares).sum()


def _squared_norm(optimizer: Any, device: torch.device) -> torch.Tensor:
    """Sum of the squared gradients of one chained ``optimizer``, over the ranks that share it.

    Experts have a separate optimizer, which other ranks share.
    """
    # Squared in float64 on the device, so that only the final sum is copied to the host.
    norm = torch.nn.utils.get_total_norm(optimizer.get_main_grads_for_grad_norm())
    square = norm.to(device, torch.float64).square()
    dist.all_reduce(square, group=optimizer.get_grad_stats_parallel_group())
    return square


def average_repeated_gradients(module: Any) -> None:
    """Replace the gradients of `repeated` parameters by their mean over tensor-parallel ranks.

    Each tensor-parallel rank computes the whole gradient of these parameters. Kernels may add in
    any order, so without the mean the ranks' weights would diverge. ``module``: megatron-core's
    DistributedDataParallel after its reduction. Collective over tensor ranks.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    gradients = [
        parameter.main_grad
        for parameter in module.parameters()
        if parameter.requires_grad and getattr(parameter, "repeated", False)
    ]
    if group.size() == 1 or not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    # A sum and a division, because gloo does not support ReduceOp.AVG.
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    means = flat.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def clip_factor(norm: float, limit: float) -> float:
    """Factor that reduces gradients of ``norm`` to a norm of at most ``limit``; 0: no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
