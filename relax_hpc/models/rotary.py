"""The rotary embedding of packs, whose positions begin anew with every row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from relax_hpc.models.packs import PackedRows


class PackRotary(torch.nn.Module):
    """Stands for megatron-core's module, whose frequencies it takes: angles of the positions that a pack has.

    megatron-core's own way through a pack reads the ends of the rows back from the device in each layer.
    """

    def __init__(self, plain: RotaryEmbedding, device: str) -> None:
        super().__init__()
        # No buffer: those would be rounded where weights are.
        self.frequencies = plain.inv_freq.to(device)

    def get_rotary_seq_len(self, *about: Any) -> Tensor:
        """Argument of `forward`: not a length, but the positions [t]. Called with the pack as last argument."""
        rows: PackedRows = about[-1]
        return rows.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """[t] -> angles [t, 1, 1, dim], float32."""
        half = torch.outer(positions.to(self.frequencies.dtype), self.frequencies)
        return torch.cat((half, half), dim=-1)[:, None, None, :]
