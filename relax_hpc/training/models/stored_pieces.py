"""Pieces inside of tensors that hold several of them, as some files do; see `pieces.StoredForm`."""

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
    """One piece [rows, columns] of a tensor. Slicing it reads the values."""

    tensor: Any
    """The tensor [blocks, ., .], or an object with the same slicing, such as a lazy safetensors
    slice."""
    block: int
    first: int
    """First row of the piece in its block."""
    rows: int
    transposed: bool
    """Whether the blocks are [columns, rows]."""

    def __getitem__(self, selection: slice | tuple[slice, slice]) -> Tensor:
        if isinstance(selection, tuple):
            row_slice, columns = selection
        else:
            row_slice, columns = selection, slice(None)
        start, stop, _ = row_slice.indices(self.rows)
        block = slice(self.block, self.block + 1)
        rows = slice(self.first + start, self.first + stop)
        if self.transposed:
            return self.tensor[block, columns, rows][0].t()
        return self.tensor[block, rows, columns][0]


def split_into_pieces(
    spec: ModelSpec, source: Mapping[str, Any], shapes: Shapes
) -> tuple[Mapping[str, Any], Shapes]:
    """``source`` and the ``shapes`` of its tensors, with pieces in place of each tensor that holds
    several."""
    packed: dict[str, StoredForm] = {}
    for name, forms in _packed_forms(spec).items():
        form = find_form(forms, shapes[name]) if name in shapes else None
        if form is not None:
            packed[name] = form
    if not packed:
        return source, shapes
    # `source` may be lazy, so that no tensor is read here.
    pieces: dict[str, Any] = {name: source[name] for name in source if name not in packed}
    sizes = {name: shape for name, shape in shapes.items() if name not in packed}
    for name, form in packed.items():
        for piece, block, first in piece_positions(form):
            rows = piece.shape[0]
            pieces[piece.name] = StoredPiece(source[name], block, first, rows, form.transposed)
            sizes[piece.name] = piece.shape
    return pieces, sizes


def piece_positions(form: StoredForm) -> Iterator[tuple[Piece, int, int]]:
    """Each piece of a tensor that holds several, with its block and its first row there."""
    for number, block in enumerate(form.blocks):
        first = 0
        for piece in block:
            yield piece, number, first
            first += piece.shape[0]


def as_published(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combine whole ``tensors`` of pieces to the published form of the family."""
    return _combine(published_forms(spec), tensors)


def as_in_transformers(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole ``tensors`` of files in the form of transformers 5: all experts of a layer in one
    tensor, not transposed."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    pieces, _ = split_into_pieces(spec, tensors, shapes)
    return _combine({name: forms[-1] for name, forms in _packed_forms(spec).items()}, pieces)


def _packed_forms(spec: ModelSpec) -> dict[str, tuple[StoredForm, ...]]:
    return spec.packed_forms(all_pieces(spec)) if spec.experts else {}


def _combine(forms: Mapping[str, StoredForm], pieces: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of ``pieces``, combined where ``forms`` have several. KeyError: one is missing."""
    import torch

    tensors = dict(pieces)
    for name, form in forms.items():
        if len(form.pieces) == 1:
            continue
        blocks = []
        for block in form.blocks:
            joined = torch.cat([tensors.pop(piece.name)[:] for piece in block])
            blocks.append(joined.t() if form.transposed else joined)
        tensors[name] = torch.stack(blocks)
    return tensors
