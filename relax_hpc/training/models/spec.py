"""Specification of a model. Each model family is a subclass; the content of a config.json gives an
instance.

The base class describes a decoder with grouped-query attention, a rotary embedding, RMS norms and
gated feed-forward layers. A family overrides the differences.
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
    """One model. Two are equal if they do the same arithmetic with their weights."""

    model_type: ClassVar[str]
    """Value of config.json's `model_type`, which selects the family."""
    architecture: ClassVar[str]
    """The only supported entry of config.json's `architectures`."""
    uses: ClassVar[tuple[Use, ...]] = ("train", "convert")
    required_keys: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    )
    """Keys that config.json must have."""
    extra_rules: ClassVar[Mapping[str, Rule]] = {}
    """Rules for keys that differ from the common ones in `rules.DECODER`."""
    decoder: ClassVar[str] = "model."
    """Beginning of the names of the decoder's tensors in Hugging Face files."""
    output: ClassVar[str] = "lm_head.weight"
    """Name of the output layer's tensor in Hugging Face files."""
    untrained_prefixes: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors in Hugging Face files that are not trained."""
    published_packed: ClassVar[bool] = False
    """Whether the published files hold several pieces in one tensor; see `packed_forms`."""
    qk_norm: ClassVar[bool] = False
    """Whether queries and keys are normalized per head."""
    row_fields: ClassVar[tuple[str, ...]] = ()
    """Token fields of rows that `inputs` takes, besides the token ids."""
    ties_in_sglang: ClassVar[bool] = True
    """Whether SGLang's class ties the output layer to the embedding if `tied` is set."""

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
    """Experts per layer; 0: a dense model."""
    chosen: int = 0
    """Experts per layer that compute a token."""
    towers: tuple[Tower, ...] = ()
    """Encoders of media before the decoder."""
    rotary_sections: tuple[int, ...] = ()
    """Numbers of rotary frequencies that use the position in time, in height and in width. Empty: a
    token has one position, which all frequencies use."""
    placeholders: tuple[int, ...] = ()
    """Tokens that embeddings of media replace. They have no probability."""
    positions: int = field(default=0, compare=False)
    """Largest number of positions of a sequence; 0: config.json has no limit."""
    init_std: float = field(default=0.02, compare=False)

    # -- config.json -------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any]) -> Self:
        """Build from the content of config.json, as `families.checked_config` returns it."""
        return cls(**cls.sizes(hf_config))

    @classmethod
    def sizes(cls, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the class's fields, by name."""
        heads = hf_config["num_attention_heads"]
        return {
            "hidden": hf_config["hidden_size"],
            "inner": hf_config["intermediate_size"],
            "layers": hf_config["num_hidden_layers"],
            "heads": heads,
            "groups": hf_config.get("num_key_value_heads", heads),
            "head_dim": hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
            "vocab": hf_config["vocab_size"],
            "tied": hf_config.get("tie_word_embeddings", False),
            "eps": float(hf_config["rms_norm_eps"]),
            "rope_base": rope_theta(hf_config),
            "positions": hf_config.get("max_position_embeddings", 0),
            "init_std": hf_config.get("initializer_range", 0.02),
        }

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """Rules for supported values, by key."""
        return {**DECODER, "architectures": one_of([cls.architecture]), **cls.extra_rules}

    @classmethod
    def contradictions(cls, hf_config: Mapping[str, Any]) -> Iterator[str]:
        """Contradictions between keys whose values are valid separately, one line each."""
        # Values have any type before their rules are checked.
        heads: Any = hf_config.get("num_attention_heads")
        groups: Any = hf_config.get("num_key_value_heads")
        dim: Any = hf_config.get("head_dim")
        if SIZE.fits(heads) and SIZE.fits(groups) and heads % groups:
            yield f"num_key_value_heads is {groups}, supported is a divisor of {heads} heads"
        if SIZE.fits(dim) and dim % 2:
            yield f"head_dim is {dim}, supported are even numbers (rotary embedding)"
        kinds, layers = hf_config.get("layer_types"), hf_config.get("num_hidden_layers")
        if isinstance(kinds, list) and len(kinds) != layers:
            yield (
                f"layer_types has {len(kinds)} entries, supported is one for each of "
                f"num_hidden_layers, {layers}"
            )
        if all(hf_config.get(name) for name in ROPE) and hf_config[ROPE[0]] != hf_config[ROPE[1]]:
            yield (
                f"{ROPE[1]} is {hf_config[ROPE[1]]!r:.60} and differs from {ROPE[0]}, supported is "
                "one of them"
            )
        values = (hf_config.get("rope_theta"), rope(hf_config).get("rope_theta"))
        bases = [base for base in values if NUMBER.fits(base)]
        if len({*bases}) > 1:
            yield (
                f"rope_theta is {bases[0]}, and {bases[1]} in a mapping of the rotary embedding; "
                "keep one"
            )

    @classmethod
    def sections(cls) -> dict[str, Section]:
        """Rules for the mappings of config.json, by the beginning of their keys, such as
        `text_config.`."""
        return {"": Section(cls.rules(), cls.required_keys, cls.contradictions)}

    @property
    def route_shape(self) -> RouteShape | None:
        """Shape of the routes of its tokens; None: it has no experts."""
        return None

    # -- ranks -------------------------------------------------------------------------------------

    def divided_sizes(self, parallel: ParallelConfig) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by their keys in config.json."""
        return {
            "num_attention_heads": self.heads,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
        }

    def split_errors(self, parallel: ParallelConfig) -> Iterator[str]:
        """Reasons why ranks cannot split the model as ``parallel`` describes.

        Each is one line that begins with the field.
        """
        for key, size in self.divided_sizes(parallel).items():
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
        """Reason why towers with these ``names`` cannot be frozen, a line that begins with the
        field."""
        towers = [tower.name for tower in self.towers]
        unknown = [name for name in names if name not in towers]
        if unknown:
            allowed = ", ".join(towers) or f"none; a {self.model_type} model takes no media"
            yield f"frozen_towers: found {', '.join(unknown)}, allowed: {allowed}"

    def _shallow_stages(self, parallel: ParallelConfig) -> Iterator[str]:
        """Reason why the first stage has too few layers for the towers."""
        layers = len(stage_layers(self.layers, parallel)[0])
        if layers < self.levels:
            yield (
                f"first_stage_layers: found {parallel.first_stage_layers}, with which the first "
                f"stage has {layers}, allowed: {self.levels} or more; the vision tower adds values "
                "to the results of so many layers"
            )

    @property
    def levels(self) -> int:
        """Number of first decoder layers to whose results a tower adds values."""
        return max((tower.levels for tower in self.towers), default=0)

    @property
    def group_rows(self) -> int:
        """Rows of one key-value head and its queries in the matrix of queries, keys and values."""
        return (self.heads // self.groups + 2) * self.head_dim

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the embedding: the vocabulary, rounded up to a multiple of the tensor-parallel
        size."""
        return -(-self.vocab // tensor) * tensor

    def matrix_elements(self) -> int:
        """Elements of all matrices that multiply a token. A tied embedding counts once, as output
        layer."""
        attention = 2 * self.hidden * (self.heads + self.groups) * self.head_dim
        return self.layers * (attention + self.mlp_matrix_elements()) + self.hidden * self.vocab

    def mlp_matrix_elements(self) -> int:
        """Elements of the feed-forward matrices of a layer that multiply a token."""
        return 3 * self.hidden * self.inner

    # -- names of weights --------------------------------------------------------------------------

    @classmethod
    def is_untrained(cls, name: str) -> bool:
        """Whether the tensor ``name`` is not trained; see `untrained_prefixes`."""
        return name.startswith(cls.untrained_prefixes)

    @property
    def embedding(self) -> str:
        """Name of the embedding's tensor in Hugging Face files."""
        return f"{self.decoder}embed_tokens.weight"

    def layer_entries(
        self, ours: str, theirs: str, norms: Mapping[str, str]
    ) -> list[FusedParameter]:
        """Parameters of a layer. Names of megatron-core begin with ``ours``, those of Hugging Face
        with ``theirs``.

        ``norms``: megatron-core's names of "input_norm" and "mlp_norm", which depend on the layer
        spec.
        """
        return [
            *self.attention_entries(ours, theirs, norms),
            *self.mlp_entries(ours, theirs, norms),
        ]

    def attention_entries(
        self, ours: str, theirs: str, norms: Mapping[str, str]
    ) -> Iterator[FusedParameter]:
        """Parameters of a layer's attention; see `layer_entries`."""
        query, value = self.heads * self.head_dim, self.groups * self.head_dim
        prefix = f"{theirs}self_attn."
        # In each block of the fused matrix: rows of the group's queries, then its key, then its
        # value.
        qkv, first = [], 0
        for letter, rows in (("q", query), ("k", value), ("v", value)):
            blocks = Blocks(self.groups, self.group_rows, first)
            qkv.append(Piece(f"{prefix}{letter}_proj.weight", (rows, self.hidden), 0, blocks))
            first += rows // self.groups
        input_norm = Piece(f"{theirs}input_layernorm.weight", (self.hidden,))
        yield FusedParameter(ours + norms["input_norm"], (input_norm,))
        yield FusedParameter(f"{ours}self_attention.linear_qkv.weight", tuple(qkv), "qkv")
        for letter in "qk" if self.qk_norm else "":
            norm = Piece(f"{prefix}{letter}_norm.weight", (self.head_dim,))
            yield FusedParameter(f"{ours}self_attention.{letter}_layernorm.weight", (norm,))
        out = Piece(f"{prefix}o_proj.weight", (self.hidden, query), 1)
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
        """Parameters of a gated feed-forward layer, or of one ``expert``."""
        gate_up = tuple(
            Piece(f"{theirs}{name}_proj.weight", (inner, self.hidden), 0) for name in ("gate", "up")
        )
        yield FusedParameter(f"{ours}linear_fc1.weight", gate_up, "rows", expert)
        down = Piece(f"{theirs}down_proj.weight", (self.hidden, inner), 1)
        yield FusedParameter(f"{ours}linear_fc2.weight", (down,), expert=expert)

    def packed_forms(self, pieces: Mapping[str, Piece]) -> dict[str, Forms]:
        """Forms of tensors that hold several ``pieces`` in some files, by name."""
        return {}

    # -- megatron-core's model ---------------------------------------------------------------------

    def transformer(self, parallel: ParallelConfig) -> dict[str, Any]:
        """Settings of the family in megatron-core's transformer configuration. They override the
        standard settings of `relax_hpc.training.models.megatron`."""
        return {
            "ffn_hidden_size": self.inner,
            "qk_layernorm": self.qk_norm,
            # Micro-batches differ in length. With this setting a stage sends the shape first.
            "variable_seq_lengths": parallel.pipeline > 1,
            # Ranks may have different numbers of tokens. megatron-core 0.16.1 requires this setting
            # with variable lengths, also in dense models.
            "moe_token_dispatcher_type": "alltoall",
        }

    def rotary(self) -> dict[str, Any]:
        """Settings of the rotary embedding in megatron-core's model."""
        return {"position_embedding_type": "rope", "rotary_base": self.rope_base}

    def build(
        self,
        config: TransformerConfig,
        device: str,
        first: bool,
        last: bool,
        kernels: Kernels = "plain",
    ) -> HiddenStateModel:
        """A pipeline stage with random weights. The `first` stage holds the embedding, the `last`
        one the output layer."""
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
