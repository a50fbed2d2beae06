"""Move of the states of megatron-core's optimizers to host memory, before there was room for them
on the GPU."""

from __future__ import annotations

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
    """Free the memory of the gradients of `module`, a megatron-core DistributedDataParallel, inside
    of the block; they are zero after it."""
    storages = [buffer.grad_data.untyped_storage() for buffer in gradient_buffers(module)]
    sizes = [one.nbytes() for one in storages]
    for one in storages:
        one.resize_(0)
    yield
    for one, size in zip(storages, sizes, strict=True):
        one.resize_(size)
    module.zero_grad_buffer()


def offload_main_parameters(parts: Sequence[Any]) -> dict[Tensor, Tensor]:
    """Main parameters -> copies in host memory. ConfigError: the node has too little memory.

    Until `offload_optimizer`, one element of each parameter stays on the GPU: torch requires a
    gradient to be on the device of its parameter.
    """
    mains = [main for part in parts for main in _main_parameters(part)]
    rooms = _on_host(mains, any(main.is_cuda for main in mains), "main parameters") if mains else []
    for main, room in zip(mains, rooms, strict=True):
        room.copy_(main)
        main.data = main.new_empty(1).expand(main.shape)
    return dict(zip(mains, rooms, strict=True))


def offload_optimizer(
    part: Any, mains: Mapping[Tensor, Tensor], dtype: torch.dtype, update: Update
) -> None:
    """Have ``part``, one of megatron-core's optimizers, go on from ``mains`` and from moments of
    ``dtype`` in host memory. ConfigError: the node has too little."""
    # Views of its buffers, which are as good in every step.
    part.prepare_grads()
    gradients = {one: one.grad for group in part.param_groups for one in group["params"]}
    counted = part.get_main_grads_for_grad_norm()
    part.zero_grad()
    pinned = any(one.is_cuda for one in gradients)
    moments = [_on_host([*gradients], pinned, "optimizer states", dtype) for _ in MOMENTS]
    own = _main_parameters(part)
    copies = dict(
        zip(own, part._get_model_and_main_params_data_float16()[0] if own else (), strict=True)
    )
    for main in own:
        main.data = mains[main]
    part.optimizer = OffloadedAdamW(
        part.param_groups,
        dict(zip(gradients, zip(*moments, strict=True), strict=True)),
        gradients,
        copies,
        update,
    )
    part.prepare_grads = lambda: False
    part.get_main_grads_for_grad_norm = lambda: counted
    # The model's are written by the optimizer.
    part._copy_main_params_to_model_params = lambda: None


def _main_parameters(part: Any) -> list[Tensor]:
    """Main parameters that are tensors beside the model's."""
    names = "shard_fp32_from_float16_groups", "fp32_from_float16_groups"
    groups = next((getattr(part, name) for name in names if hasattr(part, name)), [])
    return [main for group in groups for main in group]


def _on_host(
    like: Sequence[Tensor], pinned: bool, what: str, dtype: torch.dtype | None = None
) -> list[Tensor]:
    try:
        return allocate_host_tensors(like, pinned, what, dtype)
    except OSError as error:
        raise ConfigError(
            f"actor.optimizer.offload_optimizer: {error}; set it false, or take more nodes"
        ) from error
