"""megatron-core's Adam and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from relax_hpc.config.schema import OptimizerConfig
from relax_hpc.training.adam import MOMENTS, PiecewiseAdamW, Update, update_with_torch
from relax_hpc.training.offload import (
    freed_gradient_memory,
    offload_main_parameters,
    offload_optimizer,
)

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of step 0 .. steps - 1: up to `lr` over `warmup_steps`, then by its schedule to
    `lr * final_lr_share` at the last step; `cosine` as I. Loshchilov and F. Hutter, arXiv
    1608.03983, equation 5, without restarts.

    >>> config = OptimizerConfig(lr=1.0, final_lr_share=0.5, warmup_steps=2)
    >>> [learning_rate(config, step, 5) for step in range(5)]
    [0.5, 1.0, 1.0, 0.75, 0.5]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    share = min((step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps), 1.0)
    gone = {"linear": share, "cosine": (1.0 - math.cos(math.pi * share)) / 2.0, "constant": 0.0}[
        config.schedule
    ]
    return config.lr * (1.0 - (1.0 - config.final_lr_share) * gone)


def build_optimizer(
    config: OptimizerConfig, module: Any, dtype: torch.dtype, fused: bool = False
) -> Any:
    """The optimizer of `module`, a megatron-core DistributedDataParallel whose parameters have
    `dtype`.

    float32 main parameters also under bfloat16. Gradients are clipped by the trainer. ``fused``:
    Adam is one kernel for all parameters, or for a piece of one where moments are bfloat16.
    """
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides

    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_distributed_optimizer=config.distributed,
    )
    mains: Mapping[Tensor, Tensor] = {}
    # Main parameters are made on the GPU, and leave it at once: in the place of the gradients there
    # is room.
    with freed_gradient_memory(module) if config.offload else nullcontext():
        optimizer = get_megatron_optimizer(
            settings, [module], config_overrides=get_standard_config_overrides(settings)
        )
        if config.offload:
            mains = offload_main_parameters(optimizer.chained_optimizers)
    for part in optimizer.chained_optimizers:
        _take_own_adam(part, mains, config, fused)
    fill_adam_state(optimizer)
    for part in optimizer.chained_optimizers:
        one_kernel = fused and not isinstance(part.optimizer, PiecewiseAdamW)
        _choose_kernels(one_kernel, part.optimizer)
        # What was saved says how it was made then.
        part.optimizer.register_load_state_dict_post_hook(partial(_choose_kernels, one_kernel))
    return optimizer


def _take_own_adam(
    part: Any, mains: Mapping[Tensor, Tensor], config: OptimizerConfig, fused: bool
) -> None:
    """Give ``part``, one of megatron-core's optimizers, an Adam of ours where torch's has not what
    is asked for."""
    dtype = TYPES[config.states]
    update = _rounding_kernel() if fused and dtype is torch.bfloat16 else update_with_torch
    if config.offload:
        offload_optimizer(part, mains, dtype, update)
    elif dtype is torch.bfloat16:
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        moments = {one: [torch.zeros_like(one, dtype=dtype) for _ in MOMENTS] for one in parameters}
        part.optimizer = PiecewiseAdamW(part.param_groups, moments, update)


def _rounding_kernel() -> Update:
    from relax_hpc.training.triton_adam import update

    return update


def _choose_kernels(fused: bool, adam: torch.optim.Optimizer) -> None:
    """Count steps on the device by one kernel, and on the host otherwise.

    Torch's own choice where it is not one: all parameters at a time on GPUs, one on CPUs. False
    instead of None would have it take one at a time everywhere.
    """
    for group in adam.param_groups:
        group["fused"] = fused or None
        for parameter in group["params"]:
            state = adam.state.get(parameter, {})
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].to(parameter.device if fused else "cpu")


def fill_adam_state(optimizer: Any) -> None:
    """Give every parameter the state that torch's Adam makes at its first step, where it has none.

    megatron-core saves and loads optimizers on the assumption that they have stepped.
    """
    for part in optimizer.chained_optimizers:
        for parameter in (
            parameter for group in part.optimizer.param_groups for parameter in group["params"]
        ):
            if not part.optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
                part.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}


def set_rates(optimizer: Any, config: OptimizerConfig, lr: float) -> None:
    """Make the next step use `lr`, and weight decay on matrices only: norms' scales and biases are
    left alone."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
