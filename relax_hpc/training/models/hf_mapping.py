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
    entries = stage_entries(spec, range(spec.layers), first=True, last=True)
    return {piece.name: piece for entry in entries for piece in entry.pieces}


def stored_forms(spec: ModelSpec) -> dict[str, Forms]:
    """Tensors that a file of this model may hold, by name: each piece by itself, a tied embedding's
    copy, and those that hold several pieces."""
    pieces = all_pieces(spec)
    forms = {name: (single_form(piece),) for name, piece in pieces.items()}
    if spec.tied:
        forms[spec.output] = forms[spec.embedding]
    return forms | spec.packed_forms(pieces)


def published_forms(spec: ModelSpec) -> dict[str, StoredForm]:
    """Tensors of this model as its family is published, by name."""
    pieces = all_pieces(spec)
    packed = {
        name: forms[0] for name, forms in spec.packed_forms(pieces).items() if spec.published_packed
    }
    held = {piece.name for form in packed.values() for piece in form.pieces}
    return {name: single_form(piece) for name, piece in pieces.items() if name not in held} | packed


def stage_entries(
    spec: ModelSpec,
    layers: range,
    first: bool,
    last: bool,
    modules: Literal["local", "te"] = "local",
) -> list[FusedParameter]:
    """Parameters of the pipeline stage that holds `layers` (global), towers and embedding if
    `first` and logits if `last`."""
    entries: list[FusedParameter] = []
    embedding = Piece(spec.embedding, (spec.vocab, spec.hidden), 0)
    if first:
        entries += (entry for tower in spec.towers for entry in tower.entries())
        entries.append(FusedParameter("embedding.word_embeddings.weight", (embedding,)))
    for local, index in enumerate(layers):
        entries += spec.layer_entries(
            f"decoder.layers.{local}.", f"{spec.decoder}layers.{index}.", NAMES[modules]
        )
    if last:
        entries.append(
            FusedParameter(
                "decoder.final_layernorm.weight",
                (Piece(f"{spec.decoder}norm.weight", (spec.hidden,)),),
            )
        )
    if last and not spec.tied:
        entries.append(
            FusedParameter(
                "output_layer.weight", (Piece(spec.output, (spec.vocab, spec.hidden), 0),)
            )
        )
    if last and spec.tied and not first:
        entries.append(FusedParameter("output_layer.weight", (embedding,)))
    return entries


def select_experts(entries: Iterable[FusedParameter], experts: range) -> list[FusedParameter]:
    """Entries, out of ``entries``, of a rank to which ``experts`` were dealt: it numbers them from
    0."""
    found = []
    for entry in entries:
        if entry.expert is None:
            found.append(entry)
        elif entry.expert in experts:
            numbers = (
                f".local_experts.{number}."
                for number in (entry.expert, entry.expert - experts.start)
            )
            found.append(replace(entry, name=entry.name.replace(*numbers)))
    return found


def check_names(spec: ModelSpec, found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """ConfigError naming the first tensor of `source` that is missing, unknown or of another shape.

    Tied checkpoints often repeat the embedding as lm_head.weight; that one is ignored.
    """
    expected = {name: piece.shape for name, piece in all_pieces(spec).items()}
    for name in found:
        if (
            name not in expected
            and not (spec.tied and name == spec.output)
            and not spec.is_untrained(name)
        ):
            raise ConfigError(
                f"{source}: unknown tensor {name}; this is not the model that config.json describes"
            )
    for name, size in expected.items():
        if name not in found:
            raise ConfigError(f"{source}: tensor {name} is missing, expected shape {list(size)}")
        if tuple(found[name]) != size:
            raise ConfigError(
                f"{source}: tensor {name} has shape {list(found[name])}, expected {list(size)}"
            )


def cut_slice(piece: Piece, tensor: Any, parts: int, rank: int) -> Tensor:
    """The slice of `piece` for tensor-parallel `rank` of `parts`, without a copy and without the
    rows of zeros.

    `tensor` is the whole tensor or anything that slices like it, such as a lazy safetensors slice.
    """
    start, stop, _ = piece.bounds(parts, rank) if piece.axis is not None else (0, piece.shape[0], 0)
    return tensor[:, start:stop] if piece.axis == 1 else tensor[start:stop]


def join_slices(piece: Piece, parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor from the slices of all tensor-parallel ranks."""
    import torch

    if piece.axis is None:
        return parts[0]
    return (
        torch.cat(list(parts), dim=piece.axis)
        .narrow(piece.axis, 0, piece.shape[piece.axis])
        .contiguous()
    )


def fuse(entry: FusedParameter, pieces: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    """A parameter from its (sliced) pieces: rows of each key-value group as [its queries, key,
    value]."""
    import torch

    groups = sum(map(len, pieces)) // spec.group_rows if entry.fuse == "qkv" else 0
    if groups:
        return torch.cat([piece.unflatten(0, (groups, -1)) for piece in pieces], dim=1).flatten(
            0, 1
        )
    # Where ranks share a group, one has part of it.
    return pieces[0] if entry.fuse == "none" else torch.cat(list(pieces))


def split(
    entry: FusedParameter, parameter: Tensor, spec: ModelSpec, tensor: int = 1, rank: int = 0
) -> list[Tensor]:
    """Inverse of `fuse`, of tensor-parallel ``rank`` of ``tensor``."""
    views = split_views(entry, parameter, spec, tensor, rank)
    return [view.flatten(0, 1) for view in views] if entry.fuse == "qkv" else views


def split_views(
    entry: FusedParameter, parameter: Tensor, spec: ModelSpec, tensor: int, rank: int
) -> list[Tensor]:
    """The pieces of a parameter without a copy; those of `qkv` have their rows in two dimensions,
    by group."""
    if entry.fuse == "qkv":
        groups = max(spec.groups // tensor, 1)
        bounds = (piece.bounds(tensor, rank) for piece in entry.pieces)
        sizes = [(stop - start) // groups for start, stop, _ in bounds]
        return list(parameter.unflatten(0, (groups, -1)).split(sizes, dim=1))
    return list(parameter.chunk(2)) if entry.fuse == "rows" else [parameter]


def unique_pieces(
    spec: ModelSpec, entries: Iterable[FusedParameter]
) -> list[tuple[FusedParameter, Piece]]:
    """(entry, piece) pairs in order, the output layer's copy of a tied embedding left out."""
    return [
        (entry, piece)
        for entry in entries
        for piece in entry.pieces
        if not (entry.name == "output_layer.weight" and piece.name == spec.embedding)
    ]
