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
    """Qwen3 with experts. Without num_key_value_heads transformers takes 4, whatever the other
    sizes are."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    needed = (
        # Where every layer has experts, nothing has the width of a dense one.
        *(key for key in ModelSpec.needed if key != "intermediate_size"),
        "num_key_value_heads",
        "moe_intermediate_size",
        "num_experts_per_tok",
    )
    own_rules: ClassVar[Mapping[str, Rule]] = {
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
    # Qwen3MoeForCausalLM of SGLang 0.5.21 leaves its output layer as it was allocated.
    sglang_ties = False

    normalised: bool
    """Whether the probabilities of the chosen ones add up to 1."""

    @classmethod
    def sizes(cls, known: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`; ``inner`` is an expert's."""
        return super().sizes({**known, "intermediate_size": known["moe_intermediate_size"]}) | {
            "experts": known.get("num_experts") or known["num_local_experts"],
            "chosen": known["num_experts_per_tok"],
            "normalised": known.get("norm_topk_prob", False),
        }

    @classmethod
    def contradictions(cls, known: Mapping[str, Any]) -> Iterator[str]:
        """See `ModelSpec.contradictions`."""
        yield from super().contradictions(known)
        experts = [known[key] for key in ("num_experts", "num_local_experts") if key in known]
        if len({*map(str, experts)}) != 1:
            yield (
                f"num_experts is {' and '.join(map(str, experts)) or 'missing'}; is this a "
                "qwen3_moe model?"
            )
        counts = [known.get("num_hidden_layers"), *experts]
        if (
            all(type(count) is int for count in counts)
            and counts[0] * max(experts, default=0) > MAX_LAYER_EXPERTS
        ):
            yield (
                f"num_hidden_layers is {counts[0]}, supported is at most {MAX_LAYER_EXPERTS} "
                "experts of all layers"
            )

    @property
    def route_shape(self) -> RouteShape:
        """See `ModelSpec.route_shape`."""
        return RouteShape(self.layers, self.experts, self.chosen)

    def widths(self, parallel: ParallelConfig) -> dict[str, int]:
        """See `ModelSpec.widths`."""
        found = super().widths(parallel)
        inner = found.pop("intermediate_size")
        return found if parallel.expert > 1 else found | {"moe_intermediate_size": inner}

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
                "each tensor rank would send every token to the experts once more"
            )

    def mlp_matrix_elements(self) -> int:
        """See `ModelSpec.mlp_matrix_elements`: the router, and the experts of a token."""
        return self.hidden * self.experts + self.chosen * super().mlp_matrix_elements()

    def mlp_entries(
        self, ours: str, theirs: str, norms: Mapping[str, str]
    ) -> Iterator[FusedParameter]:
        """See `ModelSpec.mlp_entries`."""
        # Beside experts no layer spec fuses the norm.
        norm = Piece(f"{theirs}post_attention_layernorm.weight", (self.hidden,))
        yield FusedParameter(ours + NAMES["local"]["mlp_norm"], (norm,))
        router = Piece(f"{theirs}mlp.gate.weight", (self.experts, self.hidden))
        yield FusedParameter(f"{ours}mlp.router.weight", (router,))
        for expert in range(self.experts):
            names = f"{ours}mlp.experts.local_experts.{expert}.", f"{theirs}mlp.experts.{expert}."
            yield from self.gated(*names, self.inner, expert)

    def packed_forms(self, pieces: Mapping[str, Piece]) -> dict[str, Forms]:
        """All experts of a layer in one tensor, as transformers 5 has them in memory, [experts,
        rows, columns]; of a family that is published so, each turned around too."""
        forms = {}
        for layer in range(self.layers):
            prefix = f"{self.decoder}layers.{layer}.mlp.experts."
            for name, parts in (
                ("gate_up_proj", ("gate_proj", "up_proj")),
                ("down_proj", ("down_proj",)),
            ):
                packed = [
                    pieces[f"{prefix}{e}.{part}.weight"]
                    for e in range(self.experts)
                    for part in parts
                ]
                rows, columns = packed[0].shape[0] * len(parts), packed[0].shape[1]
                straight = StoredForm((self.experts, rows, columns), tuple(packed))
                turned = StoredForm((self.experts, columns, rows), tuple(packed), turned=True)
                forms[prefix + name] = (turned, straight) if self.published_packed else (straight,)
        return forms

    def transformer(self, parallel: ParallelConfig) -> dict[str, Any]:
        """See `ModelSpec.transformer`."""
        return super().transformer(parallel) | {
            "num_moe_experts": self.experts,
            "moe_ffn_hidden_size": self.inner,
            "moe_router_topk": self.chosen,
            # Without it the softmax is over the chosen experts, which is the same as normalising
            # their probabilities.
            "moe_router_pre_softmax": not self.normalised,
            # Which experts are chosen hangs on the last bits.
            "moe_router_dtype": "fp32",
            # Of megatron-core's own; see `expert_layer.Router`.
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": parallel.expert,
            "expert_tensor_parallel_size": parallel.expert_tensor,
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """See `ModelSpec.inputs`; routers learn what each token is worth."""
        return super().inputs(batch) | {"padding_mask": batch.shares}
