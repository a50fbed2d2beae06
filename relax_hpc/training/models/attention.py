"""Causal attention within each row of a pack. Keys and values are gathered over context-parallel
ranks."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from relax_hpc.training.models.packs import PackedRows


_LONG_ROW_TOKENS = 2048
_HOPPER = 9
"""First number of the compute capability of H100, H200 and GH200."""
_MEASURED_SIZE = 128


class CausalAttention(torch.nn.Module):
    """Causal attention within rows.

    On GPUs in half precision, one kernel computes all rows. With `computes_long_rows_alone`, cuDNN
    computes each row where `is_faster_by_row`. Otherwise torch's scaled_dot_product_attention
    computes each row. Row by row is fastest on CPUs for many short and for few long rows: padded
    rows took 0.85 to 14 times as long.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.computes_long_rows_alone = False
        self.context = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedRows,
        **__: Any,
    ) -> Tensor:
        """[t, 1, heads, dim] each, fewer heads in key and value -> [t, 1, heads * dim]."""
        # The batch dimension of a pack is 1. `packed_seq_params` contains the rows, because its
        # `qkv_format` is unknown to megatron-core.
        rows, (q, k, v) = packed_seq_params, (x.squeeze(1) for x in (query, key, value))
        if rows.order is not None:
            # One collective for keys and values. Then each piece takes its own keys.
            gathered = GatherFirst.apply(torch.stack([k, v], dim=1), self.context)
            k, v = gathered.index_select(0, rows.order).unbind(1)
        return self.attend(q, k, v, rows).flatten(1).unsqueeze(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: PackedRows) -> Tensor:
        """Attention of queries [t, heads, dim] to keys and values [keys, fewer heads, dim], by the
        pieces of `rows`. The result has the shape of the queries."""
        has_packed_kernel = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
        if not has_packed_kernel:
            return self._attend_by_row(q, k, v, rows)
        capability = _capability(q.device)
        if self.computes_long_rows_alone and is_faster_by_row(rows, q.shape[2], capability):
            return self._attend_by_row(q, k, v, rows)
        return self._attend_packed(q, k, v, rows)

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, rows: PackedRows) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # A window that is open to the left and closed to the right is a causal mask whose last
        # query attends to the last key. torch 2.13 introduced `enable_gqa`; earlier releases
        # accept grouped heads without it.
        options: dict[str, Any] = {"scale": self.scale, "window_size": (-1, 0)}
        if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
            options["enable_gqa"] = True
        max_query, max_key = max(rows.queries), max(rows.keys)
        result = varlen_attn(q, k, v, rows.query_ends, rows.key_ends, max_query, max_key, **options)
        # It returns a tuple only if auxiliary results are requested.
        assert isinstance(result, Tensor)
        return result

    def _attend_by_row(self, q: Tensor, k: Tensor, v: Tensor, rows: PackedRows) -> Tensor:
        pieces = zip(q.split(rows.queries), k.split(rows.keys), v.split(rows.keys), strict=True)
        results = []
        for piece in pieces:
            query, key, value = (x.transpose(0, 1)[None] for x in piece)
            results.append(self._attend_piece(query, key, value))
        return results[0] if len(results) == 1 else torch.cat(results)

    def _attend_piece(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[1, heads, queries or keys, dim] -> [queries, heads, dim]."""
        queries, keys = q.shape[2], k.shape[2]
        # `is_causal` aligns the mask at the first key. With more keys than queries, the last query
        # must attend to the last key.
        mask = None
        if queries != keys:
            ones = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
            mask = ones.tril(keys - queries)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def is_faster_by_row(rows: PackedRows, size: int, capability: int) -> bool:
    """Whether a GPU computes the rows faster one by one than in one call, for heads of ``size``
    elements. It reads only values on the host.

    ``capability``: first number of the device's compute capability. torch 2.11 and 2.13 have
    FlashAttention 2 for the one call, and cuDNN for single rows on Hopper. An H200 took 24.0 and
    13.5 ms for 1 x 16,384 tokens forward and backward, 3.8 and 3.2 ms for 8 x 2,048, but 2.4 and
    2.7 ms for 16 x 1,024 (tools/bench/results/gpu-nvidia-h200.json). Other GPUs and sizes of heads
    were not measured.
    """
    if capability != _HOPPER or size != _MEASURED_SIZE:
        return False
    # Unequal numbers need a mask, with which cuDNN has given wrong gradients (pytorch#196678).
    is_square = rows.queries == rows.keys
    return is_square and sum(rows.queries) >= _LONG_ROW_TOKENS * len(rows.queries)


@cache
def _capability(device: torch.device) -> int:
    """First number of the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)[0]


class GatherFirst(torch.autograd.Function):
    """Gather of all ranks' values along the first axis.

    In the backward pass, gradients are summed over ranks and return to the rank of the values.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = values.new_empty((group.size() * values.shape[0], *values.shape[1:]))
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, d_gathered: Tensor) -> tuple[Tensor, None]:
        size = d_gathered.shape[0] // ctx.group.size()
        d_values = d_gathered.new_empty((size, *d_gathered.shape[1:]))
        dist.reduce_scatter_tensor(d_values, d_gathered.contiguous(), group=ctx.group)
        return d_values, None
