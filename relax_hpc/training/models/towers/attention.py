"""Attention of towers on GPUs: one call for all frames or windows of a layer.

transformers 5.12 and 5.17 call scaled_dot_product_attention for each of them. For images and videos
the host then needs longer to launch kernels than the GPU to compute them
(tools/bench/results/gpu-nvidia-h200.json).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from relax_hpc.training.models.upload import upload

_PLAIN = "sdpa"
# transformers passes the ends of frames only to functions whose name contains "flash".
_PACKED = "torch_flash_varlen"
_LARGEST_SIZE = 256


def choose_attention(module: Any, size: int) -> None:
    """Choose the attention of a tower's ``module`` by its device, its type and the ``size`` of its
    heads in elements. CPUs, and types but half precision, keep that of transformers."""
    weight: Tensor = next(module.parameters())
    # Every layer of the module has the same configuration.
    config = module.config
    if _has_kernel(weight, size):
        _register()
        config._attn_implementation = _PACKED
    elif config._attn_implementation == _PACKED:
        config._attn_implementation = _PLAIN


def _has_kernel(weight: Tensor, size: int) -> bool:
    """Whether torch's variable-length attention runs for this device, type and size of heads."""
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    fits = size % 8 == 0 and size <= _LARGEST_SIZE
    return weight.is_cuda and is_half and fits and _is_installed()


@cache
def _is_installed() -> bool:
    return find_spec("torch.nn.attention.varlen") is not None


@cache
def _register() -> None:
    """Make `attend_packed` known to transformers."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_PACKED, attend_packed)


def attend_packed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within frames, an attention function of transformers.

    ``query``, ``key``, ``value``: [1, heads, t, dim]. ``cu_seq_lens_q``: [frames + 1] int32 on the
    host, 0 and the end of each frame. ``max_length_q``: tokens of the longest frame, on the host.
    Returns [1, t, heads, dim].
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (values[0].transpose(0, 1) for values in (query, key, value))
    ends = upload(cu_seq_lens_q.to(torch.int32).numpy(), q.device)
    longest = int(max_length_q)
    result = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling)
    # It returns a tuple only if auxiliary results are requested.
    assert isinstance(result, Tensor)
    return result[None], None
