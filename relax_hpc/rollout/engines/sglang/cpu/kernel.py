"""Replacement of `sgl_kernel` on CPUs. Its wheels have only CUDA code, but the CPU code of SGLang
0.5.21 imports it by name.

With the `torch_native` attention backend, dense models call none of its kernels, and MoE models
call `topk_softmax_cpu`. Every other kernel can be imported, and raises an error with its name when
it is called.
"""

from __future__ import annotations

from typing import NoReturn

import torch

__version__ = "0.4.7"
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define(
    "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
    "Tensor? correction_bias=None) -> (Tensor, Tensor)"
)


@torch.library.impl(_LIBRARY, "topk_softmax_cpu", "CPU")
def topk_softmax_cpu(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and ids (int32), both [tokens, topk], of the most probable experts in
    `gating_output` [tokens, experts]. `correction_bias` [experts] affects which experts are chosen,
    and not their weights.
    """
    probabilities = torch.softmax(gating_output.float(), -1)
    scores = probabilities if correction_bias is None else probabilities + correction_bias
    ids = scores.topk(topk, -1).indices
    weights = probabilities.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.to(torch.int32)


# models/qwen3_5.py of SGLang 0.5.21 looks these up when it is imported, and all Qwen-VL processors
# import it. Without them no model with media has a processor, and its server does not start. Only
# the first one is called.
_LIBRARY.define("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()")
_NAMES = ("fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu")
for _name in (*_NAMES, "fused_qkvzba_split_reshape_cat_contiguous_cpu"):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")


@torch.library.impl(_LIBRARY, "fused_sigmoid_mul_cpu", "CPU")
def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply `x` by sigmoid(`gate`), in place."""
    x.mul_(torch.sigmoid(gate))


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: needs a GPU or a CPU with AMX and its build of sgl_kernel"
        )

    return missing
