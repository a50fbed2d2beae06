"""megatron-core's Adam, and its learning rate."""

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
    """Learning rate of ``step`` (0 .. steps - 1).

    It rises to `lr` over `warmup_steps`, then follows the schedule to `lr * final_lr_share` at the
    last step. `cosine`: I. Loshchilov and F. Hutter, arXiv 1608.03983, equation 5, without
    restarts.

    >>> config = OptimizerConfig(lr=1.0, final_lr_share=0.5, warmup_steps=2)
    >>> [learning_rate(config, step, 5) for step in range(5)]
    [0.5, 1.0, 1.0, 0.75, 0.5]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps), 1.0)
    decay = {
        "linear": progress,
        "cosine": (1.0 - math.cos(math.pi * progress)) / 2.0,
        "constant": 0.0,
    }[config.schedule]
    return config.lr * (1.0 - (1.0 - config.final_lr_share) * decay)


def build_optimizer(
    config: OptimizerConfig, module: Any, dtype: torch.dtype, fused: bool = False
) -> Any:
    """The optimizer of `module`, a megatron-core DistributedDataParallel with parameters of
    `dtype`.

    Main parameters are float32, also for bfloat16. The trainer clips gradients. ``fused``: Adam is
    one kernel for all parameters, or for one piece if moments are bfloat16.
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
        # Unused here: the trainer clips, and calls `step_with_ready_grads`.
        clip_grad=config.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_distributed_optimizer=config.distributed,
    )
    mains: Mapping[Tensor, Tensor] = {}
    # megatron-core 0.16.1 creates main parameters on the GPU. Until they are offloaded, they use
    # the memory of the gradients.
    with freed_gradient_memory(module) if config.offload else nullcontext():
        optimizer = get_megatron_optimizer(
            settings, [module], config_overrides=get_standard_config_overrides(settings)
        )
        if config.offload:
            mains = offload_main_parameters(optimizer.chained_optimizers)
    for chained in optimizer.chained_optimizers:
        _replace_adam(chained, mains, config, fused)
    fill_adam_state(optimizer)
    for chained in optimizer.chained_optimizers:
        one_kernel = fused and not isinstance(chained.optimizer, PiecewiseAdamW)
        _choose_kernels(one_kernel, chained.optimizer)
        # A checkpoint contains the choice of the run that saved it.
        chained.optimizer.register_load_state_dict_post_hook(partial(_choose_kernels, one_kernel))
    return optimizer


def _replace_adam(
    optimizer: Any, mains: Mapping[Tensor, Tensor], config: OptimizerConfig, fused: bool
) -> None:
    """Replace torch's Adam in one of megatron-core's optimizers, if the states are offloaded or
    bfloat16."""
    dtype = TYPES[config.states]
    update = _fused_update() if fused and dtype is torch.bfloat16 else update_with_torch
    if config.offload:
        offload_optimizer(optimizer, mains, dtype, update)
    elif dtype is torch.bfloat16:
        moments = {
            parameter: [torch.zeros_like(parameter, dtype=dtype) for _ in MOMENTS]
            for parameter in _parameters(optimizer)
        }
        optimizer.optimizer = PiecewiseAdamW(optimizer.param_groups, moments, update)


def _parameters(optimizer: Any) -> list[Tensor]:
    """Parameters of all groups of an optimizer."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _fused_update() -> Update:
    from relax_hpc.training.triton_adam import update

    return update


def _choose_kernels(fused: bool, adam: torch.optim.Optimizer) -> None:
    """Select the kernels of torch's ``adam``. One ``fused`` kernel counts steps on the device,
    other kernels count them on the host.

    None selects torch's default: all parameters together on GPUs, one at a time on CPUs. False
    would select one at a time on all devices (torch 2.13).
    """
    for group in adam.param_groups:
        group["fused"] = fused or None
        for parameter in group["params"]:
            state = adam.state.get(parameter, {})
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].to(parameter.device if fused else "cpu")


def fill_adam_state(optimizer: Any) -> None:
    """Create the state that torch's Adam creates at its first step, for parameters without one.

    megatron-core 0.16.1 saves and loads only optimizers that have done a step.
    """
    for chained in optimizer.chained_optimizers:
        for parameter in _parameters(chained.optimizer):
            if not chained.optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
                chained.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}


def set_rates(optimizer: Any, config: OptimizerConfig, lr: float) -> None:
    """Set the learning rate of the next step. Only matrices have weight decay, not scales of norms
    and biases."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
