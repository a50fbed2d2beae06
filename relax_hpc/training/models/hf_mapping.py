"""Mapping between Hugging Face tensors and megatron-core parameters: names, fusing, tensor-parallel
slices, padding of the vocabulary.

Every load and every export uses these functions. The names need no torch. A megatron-core parameter
is fused from one or more *pieces* (Hugging Face tensors). A piece is sliced before it is fused, so
that a rank reads only its slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from relax_hpc.base.errors import ConfigError
from relax_hpc.training.models.pieces import (
    NAMES,
    Forms,
    FusedParameter,
    Piece,
    StoredForm,
    single_form,
)

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.training.models.spec import ModelSpec


def all_pieces(spec: ModelSpec) -> dict[str, Piece]:
    """Every Hugging Face tensor of the model by name."""
    pieces: dict[str, Piece] = {}
    for entry in stage_entries(spec, range(spec.layers), first=True, last=True):
        pieces |= {piece.name: piece for piece in entry.pieces}
    return pieces


def stored_forms(spec: ModelSpec) -> dict[str, Forms]:
    """Forms of all tensors that a file of this model may hold, by name.

    These are single pieces, a copy of a tied embedding, and tensors that hold several pieces.
    """
    pieces = all_pieces(spec)
    forms: dict[str, Forms] = {name: (single_form(piece),) for name, piece in pieces.items()}
    if spec.tied:
        forms[spec.output] = forms[spec.embedding]
    return forms | spec.packed_forms(pieces)


def published_forms(spec: ModelSpec) -> dict[str, StoredForm]:
    """Forms of this model's tensors in the published files of its family, by name."""
    pieces = all_pieces(spec)
    packed: dict[str, StoredForm] = {}
    if spec.published_packed:
        packed = {name: forms[0] for name, forms in spec.packed_forms(pieces).items()}
    for form in packed.values():
        for piece in form.pieces:
            pieces.pop(piece.name, None)
    return {name: single_form(piece) for name, piece in pieces.items()} | packed


def stage_entries(
    spec: ModelSpec,
    layers: range,
    first: bool,
    last: bool,
    modules: Literal["local", "te"] = "local",
) -> list[FusedParameter]:
    """Parameters of the pipeline stage that holds `layers` (global numbers).

    The `first` stage also holds towers and embedding, the `last` one the output layer. `modules`:
    megatron-core's layer spec.
    """
    entries: list[FusedParameter] = []
    embedding = Piece(spec.embedding, (spec.vocab, spec.hidden), 0)
    if first:
        for tower in spec.towers:
            entries += tower.entries()
        entries.append(FusedParameter("embedding.word_embeddings.weight", (embedding,)))
    # megatron-core numbers the layers of each stage from 0, Hugging Face those of the whole model.
    for local, index in enumerate(layers):
        ours, theirs = f"decoder.layers.{local}.", f"{spec.decoder}layers.{index}."
        entries += spec.layer_entries(ours, theirs, NAMES[modules])
    if last:
        norm = Piece(f"{spec.decoder}norm.weight", (spec.hidden,))
        entries.append(FusedParameter("decoder.final_layernorm.weight", (norm,)))
    if last and not spec.tied:
        output = Piece(spec.output, (spec.vocab, spec.hidden), 0)
        entries.append(FusedParameter("output_layer.weight", (output,)))
    # A tied output layer on another stage than the embedding is a copy of it.
    if last and spec.tied and not first:
        entries.append(FusedParameter("output_layer.weight", (embedding,)))
    return entries


def select_experts(entries: Iterable[FusedParameter], experts: range) -> list[FusedParameter]:
    """Entries of a rank with these ``experts``. The rank numbers its experts from
    0."""
    selected = []
    for entry in entries:
        if entry.expert is None:
            selected.append(entry)
        elif entry.expert in experts:
            name = entry.name.replace(
                f".local_experts.{entry.expert}.",
                f".local_experts.{entry.expert - experts.start}.",
            )
            selected.append(replace(entry, name=name))
    return selected


def check_names(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Compare the names and ``shapes`` of the tensors in `source` with the model.

    ConfigError names the first tensor that is missing, unknown or of another shape. Tied
    checkpoints often repeat the embedding as lm_head.weight; it is ignored.
    """
    expected = {name: piece.shape for name, piece in all_pieces(spec).items()}
    for name in shapes:
        is_tied_copy = spec.tied and name == spec.output
        if name not in expected and not is_tied_copy and not spec.is_untrained(name):
            raise ConfigError(
                f"{source}: unknown tensor {name}; this is not the model that config.json describes"
            )
    for name, shape in expected.items():
        if name not in shapes:
            raise ConfigError(f"{source}: tensor {name} is missing, expected shape {list(shape)}")
        if tuple(shapes[name]) != shape:
            raise ConfigError(
                f"{source}: tensor {name} has shape {list(shapes[name])}, expected {list(shape)}"
            )


def cut_slice(piece: Piece, tensor: Any, parts: int, rank: int) -> Tensor:
    """The slice of `piece` for tensor-parallel `rank` of `parts`, without a copy and without
    padding.

    `tensor` is the whole tensor, or an object with the same slicing, such as a lazy safetensors
    slice.
    """
    if piece.axis is None:
        return tensor[0 : piece.shape[0]]
    start, stop, _ = piece.bounds(parts, rank)
    return tensor[:, start:stop] if piece.axis == 1 else tensor[start:stop]


def join_slices(piece: Piece, parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor from the slices of all tensor-parallel ranks."""
    import torch

    if piece.axis is None:
        return parts[0]
    joined = torch.cat(list(parts), dim=piece.axis)
    return joined.narrow(piece.axis, 0, piece.shape[piece.axis]).contiguous()


def fuse(entry: FusedParameter, pieces: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    """Fuse (sliced) pieces to a parameter. Rows of a key-value group are ordered as [its queries,
    key, value]."""
    import torch

    # megatron-core's attention expects the rows of each key-value group together.
    groups = sum(map(len, pieces)) // spec.group_rows if entry.fuse == "qkv" else 0
    if groups:
        by_group = [piece.unflatten(0, (groups, -1)) for piece in pieces]
        return torch.cat(by_group, dim=1).flatten(0, 1)
    # If several ranks share a group, each has one part of it, whose rows stay in order.
    return pieces[0] if entry.fuse == "none" else torch.cat(list(pieces))


def split(
    entry: FusedParameter, parameter: Tensor, spec: ModelSpec, tensor: int = 1, rank: int = 0
) -> list[Tensor]:
    """Inverse of `fuse`, for tensor-parallel ``rank`` of ``tensor``."""
    views = split_views(entry, parameter, spec, tensor, rank)
    return [view.flatten(0, 1) for view in views] if entry.fuse == "qkv" else views


def split_views(
    entry: FusedParameter, parameter: Tensor, spec: ModelSpec, tensor: int, rank: int
) -> list[Tensor]:
    """The pieces of a parameter without a copy. The rows of pieces of `qkv` have two dimensions,
    [groups, rows per group]."""
    if entry.fuse == "qkv":
        groups = max(spec.groups // tensor, 1)
        bounds = (piece.bounds(tensor, rank) for piece in entry.pieces)
        sizes = [(stop - start) // groups for start, stop, _ in bounds]
        return list(parameter.unflatten(0, (groups, -1)).split(sizes, dim=1))
    return list(parameter.chunk(2)) if entry.fuse == "rows" else [parameter]


def unique_pieces(
    spec: ModelSpec, entries: Iterable[FusedParameter]
) -> list[tuple[FusedParameter, Piece]]:
    """Pairs (entry, piece) in order, without the output layer's copy of a tied embedding."""
    pairs = []
    for entry in entries:
        for piece in entry.pieces:
            if entry.name != "output_layer.weight" or piece.name != spec.embedding:
                pairs.append((entry, piece))
    return pairs
