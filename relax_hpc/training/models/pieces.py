"""Pieces of parameters: what a megatron-core parameter is made of, and how files store it.

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
_TE_NAMES = {
    "input_norm": "self_attention.linear_qkv.layer_norm_weight",
    "mlp_norm": "mlp.linear_fc1.layer_norm_weight",
}
NAMES = {"local": _LOCAL_NAMES, "te": _TE_NAMES}
"""Names of the norms' weights in the two layer specs; all other names are the same."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A parameter of equal blocks of `rows`, one for each key-value group; a piece begins in each
    at row `first`."""

    groups: int
    rows: int
    first: int

    def bounds(self, size: int, tensor: int, rank: int) -> tuple[int, int]:
        """Range (start, stop) of a piece's `size` rows that `rank` has where several ranks share a
        block, each an equal part."""
        sharing, mine = tensor // self.groups, size // self.groups
        group, part = divmod(rank, sharing)
        rows = self.rows // sharing
        start, stop = (min(max(at * rows - self.first, 0), mine) for at in (part, part + 1))
        return group * mine + start, group * mine + stop


@dataclass(frozen=True, slots=True)
class Piece:
    """A Hugging Face tensor. `axis` is what tensor parallelism splits (None: replicated)."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    blocks: Blocks | None = None
    """Blocks of the parameter that it is interleaved in."""

    def bounds(self, tensor: int, rank: int) -> tuple[int, int, int]:
        """(start, stop, length) along `axis` of the slice of `rank`; length - (stop - start) rows
        of zeros follow."""
        size = self.shape[self.axis or 0]
        if self.blocks and tensor > self.blocks.groups:
            start, stop = self.blocks.bounds(size, tensor, rank)
            return start, stop, stop - start
        length = -(-size // tensor)
        return min(rank * length, size), min((rank + 1) * length, size), length


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A tensor as a file may hold it: the bytes of its pieces, one after the other, or those of its
    blocks."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    turned: bool = False
    """Whether it is [blocks, columns, rows] of blocks that have each as many of the pieces, their
    rows one after the other."""

    @property
    def blocks(self) -> list[tuple[Piece, ...]]:
        """Pieces by block, of a tensor that has three axes."""
        size = len(self.pieces) // self.shape[0]
        return [self.pieces[first : first + size] for first in range(0, len(self.pieces), size)]


@dataclass(frozen=True, slots=True)
class FusedParameter:
    """A megatron-core parameter of one pipeline stage and the pieces that it is fused of."""

    name: str
    pieces: tuple[Piece, ...]
    fuse: Literal["none", "qkv", "rows"] = "none"
    expert: int | None = None
    """Number of the expert of its layer that it belongs to, if to one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, a matrix or a vector: its pieces are fused along axis 0,
        see `fuse`."""
        rows = sum(piece.shape[0] for piece in self.pieces)
        return (rows, *self.pieces[0].shape[1:])


Forms = tuple[StoredForm, ...]
"""Forms of one tensor, of other shapes each: as the family is published first, as transformers 5
has it last."""


def single_form(piece: Piece) -> StoredForm:
    """Form of a tensor that holds one piece."""
    return StoredForm(piece.shape, (piece,))


def find_form(forms: Forms, shape: tuple[int, ...]) -> StoredForm | None:
    """The form of a tensor of that ``shape``; None: there is none."""
    return next((form for form in forms if form.shape == shape), None)
