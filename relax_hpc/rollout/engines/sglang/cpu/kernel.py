"""Stands in for `sgl_kernel` on CPUs: its wheels hold CUDA code only, and SGLang's CPU paths import
it by name.

Dense models call nothing of it with the `torch_native` attention backend; MoE models call
`topk_softmax_cpu`. Every other kernel can be imported and fails when it is called, with its name.
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
    """Weights (float32) and int32 ids, both [tokens, topk], of the most probable experts of
    `gating_output` [tokens, experts]. `correction_bias` [experts] moves the choice of experts, not
    their weights.
    """
    probabilities = torch.softmax(gating_output.float(), -1)
    scores = probabilities if correction_bias is None else probabilities + correction_bias
    ids = scores.topk(topk, -1).indices
    weights = probabilities.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.to(torch.int32)


# Looked up when models/qwen3_5.py is imported, through which all Qwen-VL processors come: without
# them no model that takes media has a processor, and its server does not start. Only the first has
# to work.
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
