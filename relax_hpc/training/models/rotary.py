"""The rotary embedding of packs, whose positions begin anew with every row, and may have three
axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from relax_hpc.training.models.packs import PackedRows


class PackRotary(torch.nn.Module):
    """Stands for megatron-core's module, whose frequencies it takes: angles of the positions that a
    pack has.

    megatron-core's own way through a pack reads the ends of the rows back from the device in each
    layer.
    """

    def __init__(self, plain: RotaryEmbedding, device: str, sections: Sequence[int] = ()) -> None:
        """``sections``: see `ModelSpec.rotary_sections`."""
        super().__init__()
        # No buffer: those would be rounded where weights are.
        self.frequencies = plain.inv_freq.to(device)
        self.axes = torch.tensor(interleaved(len(self.frequencies), sections), device=device)

    def get_rotary_seq_len(self, *about: Any) -> Tensor:
        """Argument of `forward`: not a length, but the positions [t]. Called with the pack as last
        argument."""
        rows: PackedRows = about[-1]
        return rows.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """[t], or [3, t] by axis -> angles [t, 1, 1, dim], float32."""
        of_each = (
            positions[:, None] if positions.dim() == 1 else positions.index_select(0, self.axes).t()
        )
        half = of_each.to(self.frequencies.dtype) * self.frequencies
        return torch.cat((half, half), dim=-1)[:, None, None, :]


def interleaved(frequencies: int, sections: Sequence[int]) -> list[int]:
    """Axis (0: time, 1: height, 2: width) with which each frequency turns. The three take turns
    until height and width have as many as ``sections`` say (interleaved mRoPE, arXiv 2511.21631,
    section 2.2); time has the rest.

    >>> interleaved(8, (4, 2, 2))
    [0, 1, 2, 0, 1, 2, 0, 0]
    """
    axes = [0] * frequencies
    for axis in range(1, len(sections)):
        axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return axes
