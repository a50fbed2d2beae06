"""Hugging Face Qwen3 tensors <-> megatron-core parameters: names, fusing, tensor-parallel slices, vocabulary padding.

Pure bookkeeping on names and tensors, used by every load and every export; names alone need no torch. A megatron-core
parameter is made of one or more *pieces* (Hugging Face tensors). A piece is sliced first and fused after, so that a
rank reads only its slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"

_LOCAL_NAMES = {
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "pre_mlp_layernorm.weight",
}
_TE_NAMES = {
    "input_norm": "self_attention.linear_qkv.layer_norm_weight",
    "mlp_norm": "mlp.linear_fc1.layer_norm_weight",
}
NAMES = {"local": _LOCAL_NAMES, "te": _TE_NAMES}
"""Where the two layer specs put the norms; all other names are the same."""


@dataclass(frozen=True, slots=True)
class Qwen3Shape:
    """What of a Qwen3 config.json decides tensor shapes."""

    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    """Of every layer; 0: a dense model."""
    expert_inner: int = 0

    @classmethod
    def of(cls, hf_config: dict[str, Any]) -> Qwen3Shape:
        """From the content of config.json."""
        heads = hf_config["num_attention_heads"]
        mixed = hf_config.get("model_type") == "qwen3_moe"
        return cls(
            hidden=hf_config["hidden_size"],
            # Where every layer has experts, nothing has this size.
            inner=hf_config.get("intermediate_size", 0) if mixed else hf_config["intermediate_size"],
            layers=hf_config["num_hidden_layers"],
            heads=heads,
            groups=hf_config.get("num_key_value_heads", heads),
            head_dim=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
            vocab=hf_config["vocab_size"],
            tied=hf_config.get("tie_word_embeddings", False),
            # transformers 5 writes the second name.
            experts=(hf_config.get("num_experts") or hf_config["num_local_experts"]) if mixed else 0,
            expert_inner=hf_config["moe_intermediate_size"] if mixed else 0,
        )

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab // tensor) * tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A Hugging Face tensor. `axis` is what tensor parallelism splits (None: replicated)."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None

    def bounds(self, tensor: int, rank: int) -> tuple[int, int, int]:
        """(start, stop, length) along `axis` of the slice of `rank`; length - (stop - start) rows of zeros follow."""
        size = self.shape[self.axis or 0]
        length = -(-size // tensor)
        return min(rank * length, size), min((rank + 1) * length, size), length


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A tensor as a file may hold it: the bytes of its pieces, one after the other."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A megatron-core parameter of one pipeline stage and the pieces that it is fused of."""

    name: str
    pieces: tuple[Piece, ...]
    fuse: Literal["none", "qkv", "rows"] = "none"


def all_pieces(shape: Qwen3Shape) -> dict[str, Piece]:
    """Every Hugging Face tensor of the model by name."""
    entries = stage_entries(shape, range(shape.layers), first=True, last=True)
    return {piece.name: piece for entry in entries for piece in entry.pieces}


def stored_forms(shape: Qwen3Shape) -> dict[str, StoredForm]:
    """By name, everything that a file of this model may hold: each piece by itself, a tied embedding's copy, and all
    experts of a layer in one tensor, as transformers 5 has them in memory ([experts, rows, columns] of `Linear`)."""
    pieces = all_pieces(shape)
    forms = {name: StoredForm(piece.shape, (piece,)) for name, piece in pieces.items()}
    if shape.tied:
        forms[OUTPUT] = forms[EMBEDDING]
    for layer in range(shape.layers if shape.experts else 0):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            packed = [pieces[f"{prefix}{e}.{part}.weight"] for e in range(shape.experts) for part in parts]
            rows, columns = packed[0].shape
            forms[prefix + name] = StoredForm((shape.experts, rows * len(parts), columns), tuple(packed))
    return forms


def stage_entries(
    shape: Qwen3Shape, layers: range, first: bool, last: bool, spec: Literal["local", "te"] = "local"
) -> list[Entry]:
    """Parameters of the pipeline stage that holds `layers` (global), the embedding if `first` and logits if `last`."""
    entries = []
    embedding = Piece(EMBEDDING, (shape.vocab, shape.hidden), 0)
    if first:
        entries.append(Entry("embedding.word_embeddings.weight", (embedding,)))
    for local, index in enumerate(layers):
        entries += _layer_entries(shape, f"decoder.layers.{local}.", f"model.layers.{index}.", NAMES[spec])
    if last:
        entries.append(Entry("decoder.final_layernorm.weight", (Piece("model.norm.weight", (shape.hidden,)),)))
    if last and not shape.tied:
        entries.append(Entry("output_layer.weight", (Piece(OUTPUT, (shape.vocab, shape.hidden), 0),)))
    if last and shape.tied and not first:
        entries.append(Entry("output_layer.weight", (embedding,)))
    return entries


def _layer_entries(shape: Qwen3Shape, local: str, hf: str, names: dict[str, str]) -> list[Entry]:
    query, value, dim = shape.heads * shape.head_dim, shape.groups * shape.head_dim, shape.head_dim

    def piece(name: str, size: tuple[int, ...], axis: int | None = None) -> Piece:
        return Piece(f"{hf}{name}.weight", size, axis)

    qkv = (
        piece("self_attn.q_proj", (query, shape.hidden), 0),
        piece("self_attn.k_proj", (value, shape.hidden), 0),
        piece("self_attn.v_proj", (value, shape.hidden), 0),
    )
    entries = [
        Entry(local + names["input_norm"], (piece("input_layernorm", (shape.hidden,)),)),
        Entry(local + "self_attention.linear_qkv.weight", qkv, "qkv"),
        Entry(local + "self_attention.q_layernorm.weight", (piece("self_attn.q_norm", (dim,)),)),
        Entry(local + "self_attention.k_layernorm.weight", (piece("self_attn.k_norm", (dim,)),)),
        Entry(local + "self_attention.linear_proj.weight", (piece("self_attn.o_proj", (shape.hidden, query), 1),)),
    ]
    norm = piece("post_attention_layernorm", (shape.hidden,))
    if not shape.experts:
        entries.append(Entry(local + names["mlp_norm"], (norm,)))
        return entries + _mlp_entries(local + "mlp.", hf + "mlp.", shape.hidden, shape.inner)
    # Beside experts no layer spec fuses the norm.
    entries.append(Entry(local + _LOCAL_NAMES["mlp_norm"], (norm,)))
    entries.append(Entry(local + "mlp.router.weight", (piece("mlp.gate", (shape.experts, shape.hidden)),)))
    for expert in range(shape.experts):
        ours, theirs = f"{local}mlp.experts.local_experts.{expert}.", f"{hf}mlp.experts.{expert}."
        entries += _mlp_entries(ours, theirs, shape.hidden, shape.expert_inner)
    return entries


def _mlp_entries(local: str, hf: str, hidden: int, inner: int) -> list[Entry]:
    gate_up = tuple(Piece(f"{hf}{name}_proj.weight", (inner, hidden), 0) for name in ("gate", "up"))
    return [
        Entry(local + "linear_fc1.weight", gate_up, "rows"),
        Entry(local + "linear_fc2.weight", (Piece(f"{hf}down_proj.weight", (hidden, inner), 1),)),
    ]


def check_names(shape: Qwen3Shape, found: dict[str, tuple[int, ...]], source: str) -> None:
    """ConfigError naming the first tensor of `source` that is missing, unknown or of another shape.

    Tied checkpoints often repeat the embedding as lm_head.weight; that one is ignored.
    """
    expected = {name: piece.shape for name, piece in all_pieces(shape).items()}
    for name in found:
        if name not in expected and not (shape.tied and name == OUTPUT):
            raise ConfigError(f"{source}: unknown tensor {name}; this is not the model that config.json describes")
    for name, size in expected.items():
        if name not in found:
            raise ConfigError(f"{source}: tensor {name} is missing, expected shape {list(size)}")
        if tuple(found[name]) != size:
            raise ConfigError(f"{source}: tensor {name} has shape {list(found[name])}, expected {list(size)}")


def cut(piece: Piece, tensor: Any, parts: int, rank: int) -> Tensor:
    """The slice of `piece` for tensor-parallel `rank` of `parts`, zero rows appended where the vocabulary is padded.

    `tensor` is the whole tensor or anything that slices like it, such as a lazy safetensors slice.
    """
    import torch

    if piece.axis is None:
        return tensor[:]
    start, stop, length = piece.bounds(parts, rank)
    part = tensor[start:stop] if piece.axis == 0 else tensor[:, start:stop]
    return torch.nn.functional.pad(part, (0, 0, 0, length - (stop - start))) if piece.axis == 0 else part


def join(piece: Piece, parts: Sequence[Tensor]) -> Tensor:
    """Inverse of `cut`: the whole tensor from the slices of all tensor-parallel ranks."""
    import torch

    if piece.axis is None:
        return parts[0]
    return torch.cat(list(parts), dim=piece.axis).narrow(piece.axis, 0, piece.shape[piece.axis]).contiguous()


def fuse(entry: Entry, pieces: Sequence[Tensor], shape: Qwen3Shape) -> Tensor:
    """A parameter from its (sliced) pieces: rows of each key-value group as [its queries, key, value]."""
    import torch

    if entry.fuse == "qkv":
        groups = pieces[1].shape[0] // shape.head_dim
        return torch.cat([piece.unflatten(0, (groups, -1)) for piece in pieces], dim=1).flatten(0, 1)
    return torch.cat(list(pieces)) if entry.fuse == "rows" else pieces[0]


def split(entry: Entry, parameter: Tensor, shape: Qwen3Shape) -> list[Tensor]:
    """Inverse of `fuse`."""
    views = split_views(entry, parameter, shape)
    return [view.flatten(0, 1) for view in views] if entry.fuse == "qkv" else views


def split_views(entry: Entry, parameter: Tensor, shape: Qwen3Shape) -> list[Tensor]:
    """The pieces of a parameter without a copy; those of `qkv` have their rows in two dimensions, by group."""
    if entry.fuse == "qkv":
        dim, share = shape.head_dim, shape.heads // shape.groups
        groups = parameter.unflatten(0, (-1, (share + 2) * dim))
        return list(groups.split([share * dim, dim, dim], dim=1))
    return list(parameter.chunk(2)) if entry.fuse == "rows" else [parameter]


def unique_pieces(entries: Iterable[Entry]) -> list[tuple[Entry, Piece]]:
    """(entry, piece) pairs in order, the output layer's copy of a tied embedding left out."""
    return [
        (entry, piece)
        for entry in entries
        for piece in entry.pieces
        if not (entry.name == "output_layer.weight" and piece.name == EMBEDDING)
    ]
