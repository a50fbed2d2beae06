"""Rotary embedding of packs: positions restart with every row, and may have three axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from relax_hpc.training.models.packs import PackedRows


class PackRotary(torch.nn.Module):
    """Replacement of megatron-core's module, with the same frequencies. It computes the angles for
    the positions of a pack.

    megatron-core 0.16.1 reads the ends of a pack's rows back from the device in each layer, which
    synchronizes.
    """

    def __init__(self, plain: RotaryEmbedding, device: str, sections: Sequence[int] = ()) -> None:
        """``sections``: see `ModelSpec.rotary_sections`."""
        super().__init__()
        # Not a buffer: buffers are cast together with weights, which would round the frequencies.
        self.frequencies = plain.inv_freq.to(device)
        self.axes = torch.tensor(interleaved(len(self.frequencies), sections), device=device)

    def get_rotary_seq_len(self, *arguments: Any) -> Tensor:
        """Argument of `forward`: the positions of the pack instead of a length.

        megatron-core calls it with the pack as last argument, and passes the result to `forward`.
        """
        rows: PackedRows = arguments[-1]
        return rows.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """[t], or [3, t] by axis -> angles [t, 1, 1, dim], float32."""
        if positions.dim() == 1:
            by_frequency = positions[:, None]
        else:
            by_frequency = positions.index_select(0, self.axes).t()
        half = by_frequency.to(self.frequencies.dtype) * self.frequencies
        return torch.cat((half, half), dim=-1)[:, None, None, :]


def interleaved(frequencies: int, sections: Sequence[int]) -> list[int]:
    """Axis (0: time, 1: height, 2: width) of each frequency.

    The axes alternate until height and width have the numbers in ``sections``. The remaining
    frequencies belong to time (interleaved mRoPE, arXiv 2511.21631, section 2.2).

    >>> interleaved(8, (4, 2, 2))
    [0, 1, 2, 0, 1, 2, 0, 0]
    """
    axes = [0] * frequencies
    for axis in range(1, len(sections)):
        axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return axes
