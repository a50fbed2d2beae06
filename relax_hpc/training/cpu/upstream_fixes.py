"""Corrections of bugs of megatron-core 0.16.1 that appear on every device without Transformer
Engine and Apex.

Each correction first checks for its bug, so that it does not change a release without the bug.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_installed = False


def install() -> None:
    """Apply every correction that this megatron-core needs, once."""
    global _installed
    if _installed:
        return
    _define_router_gemm()
    _recompute_norms_without_fp8()
    _use_torch_adam()
    _skip_step_when_loading_shards()
    _give_each_parameter_its_step()
    _keep_padding_between_buckets()
    _installed = True


def _use_torch_adam() -> None:
    # Without it: which Adam trains depends on whether Transformer Engine or Apex is installed, and
    # the checkpoints of one do not load into another.
    from megatron.core import optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True


def _define_router_gemm() -> None:
    # Without it: NameError on te_general_gemm in a mixture-of-experts router that computes in
    # float32.
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _recompute_norms_without_fp8() -> None:
    # Without it: NameError on FP8GlobalStateManager when norms are recomputed, because the class
    # treats `fp8=False` as true.
    from megatron.core.tensor_parallel import random

    original = random.CheckpointWithoutOutput.__init__
    if random.HAVE_TE or not random.CheckpointWithoutOutput().fp8:
        return

    def init(self: Any, fp8: Any = False) -> None:
        original(self, fp8)
        self.fp8 = bool(fp8)

    random.CheckpointWithoutOutput.__init__ = init


def _skip_step_when_loading_shards() -> None:
    # Without it: KeyError 'step' when a distributed optimizer's checkpoint is loaded into torch's
    # Adam.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states
    # A release that mentions the step handles it.
    if "step" in inspect.getsource(original):
        return

    @torch.no_grad()
    def load(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        for key, target in {"param": main_param, **self.optimizer.state[main_param]}.items():
            if key != "step":
                target.copy_(tensors[key])

    DistributedOptimizer._set_main_param_and_optimizer_states = load


def _give_each_parameter_its_step() -> None:
    # Without it: after a resume all parameters share one step tensor, which Adam increments once
    # per parameter.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original: Callable[[Any, Any], None] = DistributedOptimizer.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        states = [
            state for state in self.optimizer.state.values() if torch.is_tensor(state.get("step"))
        ]
        if len({id(state["step"]) for state in states}) < len(states):
            for state in states:
                state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load_state_dict


def _keep_padding_between_buckets() -> None:
    # Without it: a checkpoint of a distributed optimizer with several buckets contains states of
    # wrong parameters. An example are pipeline stages that share the embedding. Padding between
    # buckets is left out of the state, but counted in the offsets by which the state is cut.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.get_parameter_state_dp_zero
    if "exceeds" not in inspect.getsource(
        DistributedOptimizer.sharded_param_state_fully_reshardable
    ):
        return

    def get_parameter_state_dp_zero(self: Any, *args: Any, **named: Any) -> Any:
        for buffer in self.buffers:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
        return original(self, *args, **named)

    DistributedOptimizer.get_parameter_state_dp_zero = get_parameter_state_dp_zero
