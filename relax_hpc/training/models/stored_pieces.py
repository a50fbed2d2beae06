"""Pieces of a model out of tensors that hold several of them, as some files do; see
`pieces.StoredForm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_hpc.training.models.hf_mapping import all_pieces, published_forms
from relax_hpc.training.models.pieces import Piece, StoredForm, find_form

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.training.models.spec import ModelSpec

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One piece [rows, columns] of a tensor, read when it is sliced."""

    tensor: Any
    """The tensor [blocks, ., .], or anything that slices like it, such as a lazy safetensors
    slice."""
    block: int
    first: int
    """First row of it in its block."""
    rows: int
    turned: bool
    """Whether blocks lie turned around."""

    def __getitem__(self, part: slice | tuple[slice, slice]) -> Tensor:
        rows, columns = part if isinstance(part, tuple) else (part, slice(None))
        start, stop, _ = rows.indices(self.rows)
        block, own = slice(self.block, self.block + 1), slice(self.first + start, self.first + stop)
        return (
            self.tensor[block, columns, own][0].t()
            if self.turned
            else self.tensor[block, own, columns][0]
        )


def split_into_pieces(
    spec: ModelSpec, source: Mapping[str, Any], shapes: Shapes
) -> tuple[Mapping[str, Any], Shapes]:
    """``source`` and the ``shapes`` of its tensors with pieces in the place of tensors that hold
    several."""
    forms = spec.packed_forms(all_pieces(spec)) if spec.experts else {}
    there = (
        (name, find_form(some, shapes[name])) for name, some in forms.items() if name in shapes
    )
    found = {name: form for name, form in there if form}
    if not found:
        return source, shapes
    pieces: dict[str, Any] = {name: source[name] for name in source if name not in found}
    sizes = {name: shape for name, shape in shapes.items() if name not in found}
    for name, form in found.items():
        for piece, block, first in piece_positions(form):
            pieces[piece.name] = StoredPiece(
                source[name], block, first, piece.shape[0], form.turned
            )
            sizes[piece.name] = piece.shape
    return pieces, sizes


def piece_positions(form: StoredForm) -> Iterator[tuple[Piece, int, int]]:
    """Pieces of a tensor that holds several, with the number of the block, and of the first row
    there, of each."""
    for number, block in enumerate(form.blocks):
        first = 0
        for piece in block:
            yield piece, number, first
            first += piece.shape[0]


def as_published(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole ``tensors`` of pieces, put together as the family is published."""
    return _packed(published_forms(spec), tensors)


def as_in_transformers(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole ``tensors`` of files as transformers 5 has them in memory: all experts of a layer in
    one, none turned around."""
    pieces, _ = split_into_pieces(
        spec, tensors, {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    )
    forms = spec.packed_forms(all_pieces(spec)) if spec.experts else {}
    return _packed({name: some[-1] for name, some in forms.items()}, pieces)


def _packed(forms: Mapping[str, StoredForm], pieces: Mapping[str, Any]) -> dict[str, Tensor]:
    """``pieces``, those of ``forms`` put together. KeyError: one of these is missing."""
    import torch

    found = dict(pieces)
    for name, form in forms.items():
        if len(form.pieces) == 1:
            continue
        blocks = [torch.cat([found.pop(piece.name)[:] for piece in block]) for block in form.blocks]
        found[name] = torch.stack([block.t() if form.turned else block for block in blocks])
    return found
