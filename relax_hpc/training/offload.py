"""Move of the states of megatron-core's optimizers to host memory, before they occupy memory of the
GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.host_memory import allocate_host_tensors
from relax_hpc.training.adam import MOMENTS, Update
from relax_hpc.training.gradients import gradient_buffers
from relax_hpc.training.offloaded_adam import OffloadedAdamW


@contextmanager
def freed_gradient_memory(module: Any) -> Iterator[None]:
    """Context in which the gradients of `module`, a megatron-core DistributedDataParallel, have no
    memory. After the context they are zero."""
    storages = [buffer.grad_data.untyped_storage() for buffer in gradient_buffers(module)]
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    yield
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
    module.zero_grad_buffer()


def offload_main_parameters(optimizers: Sequence[Any]) -> dict[Tensor, Tensor]:
    """Main parameters -> copies in host memory. ConfigError: the node has too little memory.

    Until `offload_optimizer`, one element of each parameter stays on the GPU: torch requires a
    gradient to be on the device of its parameter.
    """
    mains: list[Tensor] = []
    for optimizer in optimizers:
        mains += _main_parameters(optimizer)
    if not mains:
        return {}
    copies = _allocate_on_host(mains, any(main.is_cuda for main in mains), "main parameters")
    for main, copy in zip(mains, copies, strict=True):
        # `expand` keeps the shape without memory for the elements.
        copy.copy_(main)
        main.data = main.new_empty(1).expand(main.shape)
    return dict(zip(mains, copies, strict=True))


def offload_optimizer(
    optimizer: Any, mains: Mapping[Tensor, Tensor], dtype: torch.dtype, update: Update
) -> None:
    """Move one of megatron-core's optimizers to host memory.

    ``mains``: its main parameters, from `offload_main_parameters`. ``dtype``: of the moments.
    ConfigError: the node has too little memory.
    """
    # megatron-core's gradients are views of its buffers, so they stay valid in every step.
    optimizer.prepare_grads()
    gradients: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        gradients |= {parameter: parameter.grad for parameter in group["params"]}
    norm_gradients = optimizer.get_main_grads_for_grad_norm()
    optimizer.zero_grad()
    pinned = any(parameter.is_cuda for parameter in gradients)
    moments = [_allocate_on_host([*gradients], pinned, "optimizer states", dtype) for _ in MOMENTS]
    copies: dict[Tensor, Tensor] = {}
    local_mains = _main_parameters(optimizer)
    if local_mains:
        model_parameters, _ = optimizer._get_model_and_main_params_data_float16()
        copies = dict(zip(local_mains, model_parameters, strict=True))
    for main in local_mains:
        main.data = mains[main]
    optimizer.optimizer = OffloadedAdamW(
        optimizer.param_groups,
        dict(zip(gradients, zip(*moments, strict=True), strict=True)),
        gradients,
        copies,
        update,
    )
    optimizer.prepare_grads = lambda: False
    optimizer.get_main_grads_for_grad_norm = lambda: norm_gradients
    # OffloadedAdamW writes the model's parameters itself.
    optimizer._copy_main_params_to_model_params = lambda: None


def _main_parameters(optimizer: Any) -> list[Tensor]:
    """Main parameters, if they are other tensors than the model's parameters."""
    # Names in megatron-core 0.16.1 of the distributed optimizer and of the other one.
    names = "shard_fp32_from_float16_groups", "fp32_from_float16_groups"
    groups: list[list[Tensor]] = []
    for name in names:
        if hasattr(optimizer, name):
            groups = getattr(optimizer, name)
            break
    return list(itertools.chain.from_iterable(groups))


def _allocate_on_host(
    like: Sequence[Tensor], pinned: bool, purpose: str, dtype: torch.dtype | None = None
) -> list[Tensor]:
    try:
        return allocate_host_tensors(like, pinned, purpose, dtype)
    except OSError as error:
        raise ConfigError(
            f"actor.optimizer.offload: {error}; set it false, or take more nodes"
        ) from error
