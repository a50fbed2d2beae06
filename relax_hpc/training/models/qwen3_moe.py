"""Qwen3 with experts in every layer. arXiv 2505.09388."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from relax_hpc.base.routes import RouteShape
from relax_hpc.training.models.pieces import NAMES, Forms, FusedParameter, Piece, StoredForm
from relax_hpc.training.models.rules import EXPERTS, FLAG, MAX_LAYER_EXPERTS, SIZE, Rule, one_of
from relax_hpc.training.models.spec import ModelSpec

if TYPE_CHECKING:
    from relax_hpc.config.schema import ParallelConfig
    from relax_hpc.training.models.batches import Batch


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(ModelSpec):
    """Qwen3 with experts. The default of transformers for num_key_value_heads is 4, independent of
    the other sizes, so the key is required."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    required_keys = (
        # Every layer has experts, so no layer has the width of a dense one.
        *(key for key in ModelSpec.required_keys if key != "intermediate_size"),
        "num_key_value_heads",
        "moe_intermediate_size",
        "num_experts_per_tok",
    )
    extra_rules: ClassVar[Mapping[str, Rule]] = {
        "moe_intermediate_size": SIZE,
        "num_experts": EXPERTS,
        # As transformers 5 writes it.
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": SIZE,
        "norm_topk_prob": FLAG,
        "decoder_sparse_step": one_of(1),
        "mlp_only_layers": one_of([]),
    }
    qk_norm = True
    # Qwen3MoeForCausalLM of SGLang 0.5.21 does not tie its output layer: the layer stays
    # uninitialized.
    ties_in_sglang = False

    normalizes_topk: bool
    """Whether the probabilities of the chosen experts add up to 1."""

    @classmethod
    def sizes(cls, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`; ``inner`` is the width of an expert."""
        inner = hf_config["moe_intermediate_size"]
        return super().sizes({**hf_config, "intermediate_size": inner}) | {
            "experts": hf_config.get("num_experts") or hf_config["num_local_experts"],
            "chosen": hf_config["num_experts_per_tok"],
            "normalizes_topk": hf_config.get("norm_topk_prob", False),
        }

    @classmethod
    def contradictions(cls, hf_config: Mapping[str, Any]) -> Iterator[str]:
        """See `ModelSpec.contradictions`."""
        yield from super().contradictions(hf_config)
        keys = ("num_experts", "num_local_experts")
        experts = [hf_config[key] for key in keys if key in hf_config]
        if len({*map(str, experts)}) != 1:
            yield (
                f"num_experts is {' and '.join(map(str, experts)) or 'missing'}; is this a "
                "qwen3_moe model?"
            )
        layers: Any = hf_config.get("num_hidden_layers")
        are_counts = all(type(count) is int for count in (layers, *experts))
        if are_counts and layers * max(experts, default=0) > MAX_LAYER_EXPERTS:
            yield (
                f"num_hidden_layers is {layers}, supported is at most {MAX_LAYER_EXPERTS} "
                "experts of all layers"
            )

    @property
    def route_shape(self) -> RouteShape:
        """See `ModelSpec.route_shape`."""
        return RouteShape(self.layers, self.experts, self.chosen)

    def divided_sizes(self, parallel: ParallelConfig) -> dict[str, int]:
        """See `ModelSpec.divided_sizes`."""
        sizes = super().divided_sizes(parallel)
        inner = sizes.pop("intermediate_size")
        return sizes if parallel.expert > 1 else sizes | {"moe_intermediate_size": inner}

    def split_errors(self, parallel: ParallelConfig) -> Iterator[str]:
        """See `ModelSpec.split_errors`."""
        yield from super().split_errors(parallel)
        expert, stage = parallel.expert, parallel.tensor * parallel.context * parallel.data
        if self.experts % expert:
            yield (
                f"expert: found {expert}, allowed: a divisor of the model's num_experts, "
                f"{self.experts}"
            )
        if stage % expert:
            yield f"expert: found {expert}, allowed: a divisor of tensor * context * data, {stage}"
        if parallel.tensor > 1 and not parallel.sequence_parallel:
            yield (
                f"sequence_parallel: found false with tensor {parallel.tensor}, allowed: true; "
                "otherwise each tensor rank sends every token to the experts again"
            )

    def mlp_matrix_elements(self) -> int:
        """See `ModelSpec.mlp_matrix_elements`: the router, and the experts of a token."""
        return self.hidden * self.experts + self.chosen * super().mlp_matrix_elements()

    def mlp_entries(
        self, ours: str, theirs: str, norms: Mapping[str, str]
    ) -> Iterator[FusedParameter]:
        """See `ModelSpec.mlp_entries`."""
        # In layers of experts, no layer spec fuses the norm.
        norm = Piece(f"{theirs}post_attention_layernorm.weight", (self.hidden,))
        yield FusedParameter(ours + NAMES["local"]["mlp_norm"], (norm,))
        router = Piece(f"{theirs}mlp.gate.weight", (self.experts, self.hidden))
        yield FusedParameter(f"{ours}mlp.router.weight", (router,))
        for expert in range(self.experts):
            names = f"{ours}mlp.experts.local_experts.{expert}.", f"{theirs}mlp.experts.{expert}."
            yield from self.gated(*names, self.inner, expert)

    def packed_forms(self, pieces: Mapping[str, Piece]) -> dict[str, Forms]:
        """All experts of a layer in one tensor [experts, rows, columns], as transformers 5 has them
        in memory. If the family is published packed, also [experts, columns, rows]."""
        forms: dict[str, Forms] = {}
        for layer in range(self.layers):
            prefix = f"{self.decoder}layers.{layer}.mlp.experts."
            for name, matrices in (
                ("gate_up_proj", ("gate_proj", "up_proj")),
                ("down_proj", ("down_proj",)),
            ):
                packed: list[Piece] = []
                for expert in range(self.experts):
                    packed += (pieces[f"{prefix}{expert}.{matrix}.weight"] for matrix in matrices)
                rows, columns = packed[0].shape[0] * len(matrices), packed[0].shape[1]
                plain = StoredForm((self.experts, rows, columns), tuple(packed))
                transposed = StoredForm(
                    (self.experts, columns, rows), tuple(packed), transposed=True
                )
                key = f"{prefix}{name}"
                forms[key] = (transposed, plain) if self.published_packed else (plain,)
        return forms

    def transformer(self, parallel: ParallelConfig) -> dict[str, Any]:
        """See `ModelSpec.transformer`."""
        return super().transformer(parallel) | {
            "num_moe_experts": self.experts,
            "moe_ffn_hidden_size": self.inner,
            "moe_router_topk": self.chosen,
            # If false, the softmax is over the chosen experts, which equals normalizing their
            # probabilities.
            "moe_router_pre_softmax": not self.normalizes_topk,
            # The choice of experts depends on the last bits.
            "moe_router_dtype": "fp32",
            # Disables megatron-core's balance losses; `expert_layer.Router` has its own.
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": parallel.expert,
            "expert_tensor_parallel_size": parallel.expert_tensor,
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """See `ModelSpec.inputs`. Routers receive the weight of each token as `padding_mask`."""
        return super().inputs(batch) | {"padding_mask": batch.shares}
