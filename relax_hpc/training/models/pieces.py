"""Pieces of parameters: what a megatron-core parameter is fused from, and how files store it.

A megatron-core parameter (`FusedParameter`) consists of one or more Hugging Face tensors
(`Piece`). This module needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_LOCAL_NAMES = {
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "pre_mlp_layernorm.weight",
}
# Transformer Engine's layers fuse a norm with the linear layer that follows it.
_TE_NAMES = {
    "input_norm": "self_attention.linear_qkv.layer_norm_weight",
    "mlp_norm": "mlp.linear_fc1.layer_norm_weight",
}
NAMES = {"local": _LOCAL_NAMES, "te": _TE_NAMES}
"""Names of the norms' weights in the two layer specs of megatron-core. All other names are the
same in both."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Equal blocks of a parameter, each with `rows` rows, one block per key-value group. A piece
    begins in each block at row `first`."""

    groups: int
    rows: int
    first: int

    def bounds(self, size: int, tensor: int, rank: int) -> tuple[int, int]:
        """Range (start, stop) of a piece's `size` rows for `rank`, if several of the `tensor` ranks
        share a block in equal parts."""
        ranks_per_block, rows_per_group = tensor // self.groups, size // self.groups
        group, part = divmod(rank, ranks_per_block)
        rows = self.rows // ranks_per_block
        start = min(max(part * rows - self.first, 0), rows_per_group)
        stop = min(max((part + 1) * rows - self.first, 0), rows_per_group)
        return group * rows_per_group + start, group * rows_per_group + stop


@dataclass(frozen=True, slots=True)
class Piece:
    """A Hugging Face tensor. Tensor parallelism splits it along `axis` (None: it is replicated)."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    blocks: Blocks | None = None
    """Blocks of the parameter, if the piece is interleaved in them."""

    def bounds(self, tensor: int, rank: int) -> tuple[int, int, int]:
        """(start, stop, length) along `axis` of the slice of `rank` among `tensor` ranks.

        The slice is padded with length - (stop - start) rows of zeros.
        """
        size = self.shape[self.axis or 0]
        if self.blocks and tensor > self.blocks.groups:
            start, stop = self.blocks.bounds(size, tensor, rank)
            return start, stop, stop - start
        length = -(-size // tensor)
        return min(rank * length, size), min((rank + 1) * length, size), length


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Form in which a file may hold a tensor: the concatenated bytes of its pieces, or of its
    blocks."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    transposed: bool = False
    """Whether the tensor is [blocks, columns, rows]. Each block holds the same number of pieces,
    with concatenated rows."""

    @property
    def blocks(self) -> list[tuple[Piece, ...]]:
        """Pieces by block, of a tensor with three axes."""
        size = len(self.pieces) // self.shape[0]
        return [self.pieces[first : first + size] for first in range(0, len(self.pieces), size)]


@dataclass(frozen=True, slots=True)
class FusedParameter:
    """A megatron-core parameter of one pipeline stage, and the pieces that it is fused from."""

    name: str
    pieces: tuple[Piece, ...]
    fuse: Literal["none", "qkv", "rows"] = "none"
    expert: int | None = None
    """Number of its expert in the layer; None: it belongs to no expert."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, a matrix or a vector. Pieces are fused along axis 0."""
        rows = sum(piece.shape[0] for piece in self.pieces)
        return (rows, *self.pieces[0].shape[1:])


Forms = tuple[StoredForm, ...]
"""Forms of one tensor, with different shapes. The first is the published form of the family, the
last that of transformers 5."""


def single_form(piece: Piece) -> StoredForm:
    """Form of a tensor that holds one piece."""
    return StoredForm(piece.shape, (piece,))


def find_form(forms: Forms, shape: tuple[int, ...]) -> StoredForm | None:
    """The form whose tensor has that ``shape``, or None."""
    return next((form for form in forms if form.shape == shape), None)
