"""Specification of a model: a family is a class of its own, and the content of one config.json an
instance of it.

What all of them share is here: decoders with grouped-query attention, a rotary embedding, RMS norms
and gated feed-forward layers. A family changes what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from relax_hpc.base.routes import RouteShape
from relax_hpc.training.models.pieces import Blocks, Forms, FusedParameter, Piece
from relax_hpc.training.models.rules import (
    DECODER,
    NUMBER,
    ROPE,
    SIZE,
    Rule,
    Section,
    one_of,
    rope,
    rope_theta,
)
from relax_hpc.training.models.stages import stage_errors, stage_layers
from relax_hpc.training.models.towers.tower import Tower

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from relax_hpc.config.schema import Kernels, ParallelConfig
    from relax_hpc.training.models.batches import Batch
    from relax_hpc.training.models.stage_model import HiddenStateModel

Use = Literal["train", "convert"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model. Two are equal if the same arithmetic is done with their weights."""

    model_type: ClassVar[str]
    """Value of config.json's `model_type`, by which the family is found."""
    architecture: ClassVar[str]
    """Value of config.json's `architectures` that is understood, the only one."""
    uses: ClassVar[tuple[Use, ...]] = ("train", "convert")
    needed: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    )
    """Keys that config.json must have."""
    own_rules: ClassVar[Mapping[str, Rule]] = {}
    """Rules for keys that other families do not have, or understand otherwise; the rest is in
    `rules.DECODER`."""
    decoder: ClassVar[str] = "model."
    """Beginning of the names of the decoder's tensors in Hugging Face files."""
    output: ClassVar[str] = "lm_head.weight"
    """Name of the output layer's tensor there."""
    untrained_prefixes: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors there that are no part of what is trained."""
    published_packed: ClassVar[bool] = False
    """Whether it is published with several pieces in one tensor, see `packed_forms`."""
    qk_norm: ClassVar[bool] = False
    """Whether queries and keys are normalised by head."""
    row_fields: ClassVar[tuple[str, ...]] = ()
    """Token fields of rows that `inputs` takes beside the token ids."""
    sglang_ties: ClassVar[bool] = True
    """Whether SGLang's class has the embedding for its output layer where `tied` says so."""

    hidden: int
    inner: int
    """Width of a feed-forward layer."""
    layers: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    vocab: int
    tied: bool
    """Whether the output layer is the embedding."""
    eps: float = 1e-6
    rope_base: float = 10000.0
    experts: int = 0
    """Experts of every layer; 0: it has none."""
    chosen: int = 0
    """Experts of a layer that a token goes to."""
    towers: tuple[Tower, ...] = ()
    """Encoders of media before the decoder."""
    rotary_sections: tuple[int, ...] = ()
    """Frequencies of the rotary embedding that turn with time, with height and with width; empty: a
    token has one position, with which all turn."""
    placeholders: tuple[int, ...] = ()
    """Tokens in whose places media come, which have no probability."""
    positions: int = field(default=0, compare=False)
    """Most positions of a sequence; 0: the model does not say."""
    init_std: float = field(default=0.02, compare=False)

    # -- config.json -------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, known: Mapping[str, Any]) -> Self:
        """Build from the `understood` content of config.json."""
        return cls(**cls.sizes(known))

    @classmethod
    def sizes(cls, known: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the class's fields, by name."""
        heads = known["num_attention_heads"]
        return {
            "hidden": known["hidden_size"],
            "inner": known["intermediate_size"],
            "layers": known["num_hidden_layers"],
            "heads": heads,
            "groups": known.get("num_key_value_heads", heads),
            "head_dim": known.get("head_dim") or known["hidden_size"] // heads,
            "vocab": known["vocab_size"],
            "tied": known.get("tie_word_embeddings", False),
            "eps": float(known["rms_norm_eps"]),
            "rope_base": rope_theta(known),
            "positions": known.get("max_position_embeddings", 0),
            "init_std": known.get("initializer_range", 0.02),
        }

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """Rules for the values that are understood, by key."""
        return {**DECODER, "architectures": one_of([cls.architecture]), **cls.own_rules}

    @classmethod
    def contradictions(cls, known: Mapping[str, Any]) -> Iterator[str]:
        """Contradictions between keys that are each in order, one line each."""
        heads, groups, dim = (
            known.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        if SIZE.fits(heads) and SIZE.fits(groups) and heads % groups:
            yield f"num_key_value_heads is {groups}, supported is a divisor of {heads} heads"
        if SIZE.fits(dim) and dim % 2:
            yield f"head_dim is {dim}, supported are even numbers (rotary embedding)"
        kinds, layers = known.get("layer_types"), known.get("num_hidden_layers")
        if isinstance(kinds, list) and len(kinds) != layers:
            yield (
                f"layer_types has {len(kinds)} entries, supported is one for each of "
                f"num_hidden_layers, {layers}"
            )
        if all(known.get(name) for name in ROPE) and known[ROPE[0]] != known[ROPE[1]]:
            yield (
                f"{ROPE[1]} is {known[ROPE[1]]!r:.60} beside another {ROPE[0]}, supported is one "
                "of them"
            )
        bases = [
            base
            for base in (known.get("rope_theta"), rope(known).get("rope_theta"))
            if NUMBER.fits(base)
        ]
        if len({*bases}) > 1:
            yield (
                f"rope_theta is {bases[0]}, and {bases[1]} in a mapping of the rotary embedding; "
                "keep one"
            )

    @classmethod
    def sections(cls) -> dict[str, Section]:
        """Rules for the mappings of config.json, by the beginning of their keys, such as
        `text_config.`."""
        return {"": Section(cls.rules(), cls.needed, cls.contradictions)}

    @property
    def route_shape(self) -> RouteShape | None:
        """Shape of the routes of its tokens; None: it has no experts to choose."""
        return None

    # -- ranks -------------------------------------------------------------------------------------

    def widths(self, parallel: ParallelConfig) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by their keys in config.json."""
        return {
            "num_attention_heads": self.heads,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
        }

    def split_errors(self, parallel: ParallelConfig) -> Iterator[str]:
        """Reasons why ranks cannot split the model so, one line each, beginning with the field."""
        for key, size in self.widths(parallel).items():
            if size % parallel.tensor:
                yield (
                    f"tensor: found {parallel.tensor}, allowed: a divisor of the model's {key}, "
                    f"{size}"
                )
        if parallel.tensor % self.groups and self.groups % parallel.tensor:
            allowed = f"a divisor or a multiple of the model's num_key_value_heads, {self.groups}"
            yield f"tensor: found {parallel.tensor}, allowed: {allowed}"
        elif self.groups * self.group_rows % parallel.tensor:
            allowed = (
                f"a divisor of the {self.groups * self.group_rows} rows of its queries, keys and "
                "values"
            )
            yield f"tensor: found {parallel.tensor}, allowed: {allowed}"
        stages = list(stage_errors(self.layers, parallel))
        yield from stages or self._shallow_stages(parallel)
        if parallel.expert > 1 and not self.experts:
            yield (
                f"expert: found {parallel.expert}, allowed: 1; a {self.model_type} model has no "
                "experts"
            )

    def frozen_tower_errors(self, names: Sequence[str]) -> Iterator[str]:
        """Reason why the towers of these ``names`` cannot be frozen, a line that begins with the
        field."""
        there = [tower.name for tower in self.towers]
        if other := [name for name in names if name not in there]:
            allowed = ", ".join(there) or f"none; a {self.model_type} model takes no media"
            yield f"frozen_towers: found {', '.join(other)}, allowed: {allowed}"

    def _shallow_stages(self, parallel: ParallelConfig) -> Iterator[str]:
        """Reason why the first of the stages, into which ``parallel`` can cut the layers, does not
        do."""
        layers = len(stage_layers(self.layers, parallel)[0])
        if layers < (levels := self.levels):
            found = (
                f"first_stage_layers: found {parallel.first_stage_layers}, with which the "
                f"first stage has {layers}"
            )
            yield (
                f"{found}, allowed: {levels} or more; to so many layers the vision tower gives "
                "something"
            )

    @property
    def levels(self) -> int:
        """Layers of the decoder, from the first on, to which a tower gives something."""
        return max((tower.levels for tower in self.towers), default=0)

    @property
    def group_rows(self) -> int:
        """Rows of the matrix for queries, keys and values that one key-value head and its queries
        have."""
        return (self.heads // self.groups + 2) * self.head_dim

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor-parallel
        size."""
        return -(-self.vocab // tensor) * tensor

    def matrix_elements(self) -> int:
        """Elements of all matrices that a token is multiplied by; the embedding counts as output
        layer alone."""
        attention = 2 * self.hidden * (self.heads + self.groups) * self.head_dim
        return self.layers * (attention + self.mlp_matrix_elements()) + self.hidden * self.vocab

    def mlp_matrix_elements(self) -> int:
        """Elements of the matrices of a layer's feed-forward part that a token is multiplied by."""
        return 3 * self.hidden * self.inner

    # -- names of weights --------------------------------------------------------------------------

    @classmethod
    def is_untrained(cls, name: str) -> bool:
        """Whether a tensor of that name is one of the `passengers`."""
        return name.startswith(cls.untrained_prefixes)

    @property
    def embedding(self) -> str:
        """Name of the embedding's tensor in Hugging Face files."""
        return f"{self.decoder}embed_tokens.weight"

    def layer_entries(
        self, ours: str, theirs: str, norms: Mapping[str, str]
    ) -> list[FusedParameter]:
        """The parameters of a layer: megatron-core's names begin with ``ours``, Hugging Face's with
        ``theirs``.

        ``norms``: megatron-core's names of "input_norm" and "mlp_norm", which depend on the layers
        that it has.
        """
        return [
            *self.attention_entries(ours, theirs, norms),
            *self.mlp_entries(ours, theirs, norms),
        ]

    def attention_entries(
        self, ours: str, theirs: str, norms: Mapping[str, str]
    ) -> Iterator[FusedParameter]:
        """Parameters of a layer's attention; see `layer_entries`."""
        query, value, place = (
            self.heads * self.head_dim,
            self.groups * self.head_dim,
            f"{theirs}self_attn.",
        )
        qkv, first = [], 0
        for letter, rows in (("q", query), ("k", value), ("v", value)):
            blocks = Blocks(self.groups, self.group_rows, first)
            qkv.append(Piece(f"{place}{letter}_proj.weight", (rows, self.hidden), 0, blocks))
            first += rows // self.groups
        yield FusedParameter(
            ours + norms["input_norm"], (Piece(f"{theirs}input_layernorm.weight", (self.hidden,)),)
        )
        yield FusedParameter(f"{ours}self_attention.linear_qkv.weight", tuple(qkv), "qkv")
        for letter in "qk" if self.qk_norm else "":
            norm = Piece(f"{place}{letter}_norm.weight", (self.head_dim,))
            yield FusedParameter(f"{ours}self_attention.{letter}_layernorm.weight", (norm,))
        out = Piece(f"{place}o_proj.weight", (self.hidden, query), 1)
        yield FusedParameter(f"{ours}self_attention.linear_proj.weight", (out,))

    def mlp_entries(
        self, ours: str, theirs: str, norms: Mapping[str, str]
    ) -> Iterator[FusedParameter]:
        """Parameters of a layer's feed-forward part; see `layer_entries`."""
        norm = Piece(f"{theirs}post_attention_layernorm.weight", (self.hidden,))
        yield FusedParameter(ours + norms["mlp_norm"], (norm,))
        yield from self.gated(f"{ours}mlp.", f"{theirs}mlp.", self.inner)

    def gated(
        self, ours: str, theirs: str, inner: int, expert: int | None = None
    ) -> Iterator[FusedParameter]:
        """A gated feed-forward layer, or one ``expert`` of many."""
        gate_up = tuple(
            Piece(f"{theirs}{name}_proj.weight", (inner, self.hidden), 0) for name in ("gate", "up")
        )
        yield FusedParameter(f"{ours}linear_fc1.weight", gate_up, "rows", expert)
        down = Piece(f"{theirs}down_proj.weight", (self.hidden, inner), 1)
        yield FusedParameter(f"{ours}linear_fc2.weight", (down,), expert=expert)

    def packed_forms(self, pieces: Mapping[str, Piece]) -> dict[str, Forms]:
        """Tensors that hold several ``pieces`` in some files, by name."""
        return {}

    # -- megatron-core's model ---------------------------------------------------------------------

    def transformer(self, parallel: ParallelConfig) -> dict[str, Any]:
        """Settings of the family in megatron-core's transformer configuration. They override the
        standard settings of `relax_hpc.training.models.megatron`."""
        return {
            "ffn_hidden_size": self.inner,
            "qk_layernorm": self.qk_norm,
            # Micro-batches differ in length, and a stage learns the shape from the one before it.
            "variable_seq_lengths": parallel.pipeline > 1,
            # Ranks may differ in length; megatron-core asks this of dense models too when lengths
            # vary.
            "moe_token_dispatcher_type": "alltoall",
        }

    def rotary(self) -> dict[str, Any]:
        """Settings by which megatron-core's model rotates positions."""
        return {"position_embedding_type": "rope", "rotary_base": self.rope_base}

    def build(
        self,
        config: TransformerConfig,
        device: str,
        first: bool,
        last: bool,
        kernels: Kernels = "plain",
    ) -> HiddenStateModel:
        """A pipeline stage with random weights, holding the embedding if `first` and the output
        layer if `last`."""
        from relax_hpc.training.models.stage_model import build_stage

        return build_stage(
            config,
            device,
            kernels,
            first=first,
            last=last,
            vocabulary=self.padded_vocab(config.tensor_model_parallel_size),
            positions=self.positions,
            tied=self.tied,
            rotary=self.rotary(),
            rotary_sections=self.rotary_sections,
            towers=self.towers,
        )

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Arguments of the forward pass for a micro-batch, by name."""
        return {
            "input_ids": batch.tokens,
            "position_ids": batch.packed.positions[None],
            "attention_mask": None,
            "packed_seq_params": batch.packed,
        }
