"""Causal attention within each row of a pack, its keys and values gathered over context-parallel
ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from relax_hpc.training.models.packs import PackedRows


class CausalAttention(torch.nn.Module):
    """Causal attention within rows: on GPUs one kernel for all rows, of half precision only; else
    torch's scaled_dot_product_attention for each.

    Row by row is what costs least on CPUs for many short rows and for few long ones; rows padded to
    each other, or to those of about their length, took 0.85 to 14 times as long.
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
        rows, (q, k, v) = packed_seq_params, (x.squeeze(1) for x in (query, key, value))
        if rows.order is not None:
            both = GatherFirst.apply(torch.stack([k, v], dim=1), self.context).index_select(
                0, rows.order
            )
            k, v = both.unbind(1)
        return self.attend(q, k, v, rows).flatten(1).unsqueeze(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: PackedRows) -> Tensor:
        """[t, heads, dim] of queries, [keys, fewer heads, dim] of keys and values as `rows` says ->
        as the queries."""
        at_once = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
        return self._at_once(q, k, v, rows) if at_once else self._by_row(q, k, v, rows)

    def _at_once(self, q: Tensor, k: Tensor, v: Tensor, rows: PackedRows) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # A window open to the left and closed to the right is a causal mask whose last query sees
        # the last key. Before torch 2.13 there was no word for grouped heads, which worked all the
        # same.
        grouped = {"enable_gqa": True} if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}) else {}
        most = max(rows.queries), max(rows.keys)
        return varlen_attn(
            q,
            k,
            v,
            rows.query_ends,
            rows.key_ends,
            *most,
            scale=self.scale,
            window_size=(-1, 0),
            **grouped,
        )

    def _by_row(self, q: Tensor, k: Tensor, v: Tensor, rows: PackedRows) -> Tensor:
        parts = zip(q.split(rows.queries), k.split(rows.keys), v.split(rows.keys), strict=True)
        return torch.cat([self._one(*(x.transpose(0, 1)[None] for x in part)) for part in parts])

    def _one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[1, heads, queries or keys, dim] -> [queries, heads, dim]."""
        size, seen = q.shape[2], k.shape[2]
        # `is_causal` would let the first query, not the last, see what the mask's corner shows.
        mask = (
            None
            if size == seen
            else torch.ones(size, seen, dtype=torch.bool, device=q.device).tril(seen - size)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class GatherFirst(torch.autograd.Function):
    """Gather of the values of all ranks of a group along the first axis; in the backward pass
    gradients are summed over ranks and return to the rank that gave the values."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        everybody = mine.new_empty((group.size() * mine.shape[0], *mine.shape[1:]))
        dist.all_gather_into_tensor(everybody, mine.contiguous(), group=group)
        return everybody

    @staticmethod
    def backward(ctx: Any, d_everybody: Tensor) -> tuple[Tensor, None]:
        d_mine = d_everybody.new_empty(
            (d_everybody.shape[0] // ctx.group.size(), *d_everybody.shape[1:])
        )
        dist.reduce_scatter_tensor(d_mine, d_everybody.contiguous(), group=ctx.group)
        return d_mine, None
