"""Llama 2 and 3, whose 3.1 rotates slow positions less. arXiv 2307.09288, 2407.21783."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from relax_hpc.training.models.rules import NUMBER, ROPE, Rule, one_of, rope, rope_kind
from relax_hpc.training.models.spec import ModelSpec

_SCALING = {"factor": NUMBER, "low_freq_factor": one_of(1.0), "high_freq_factor": one_of(4.0)}
_SCALING["original_max_position_embeddings"] = one_of(8192)
"""Rules for the scaling of the rotary embedding: megatron-core has these values, those of all
published models, built in."""


@dataclass(frozen=True, kw_only=True)
class Llama(ModelSpec):
    """Llama. A missing num_key_value_heads or head_dim follows from the heads."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    own_rules: ClassVar[Mapping[str, Rule]] = {
        "mlp_bias": one_of(False),
        "pretraining_tp": one_of(1),
        **{
            f"{name}.{key}": one_of("default", "llama3")
            for name in ROPE
            for key in ("rope_type", "type")
        },
        **{f"{name}.{key}": rule for name in ROPE for key, rule in _SCALING.items()},
    }

    rope_factor: float = 1.0
    """Factor by which slow positions are rotated less; 1: none is."""

    @classmethod
    def sizes(cls, known: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`."""
        factor = float(rope(known)["factor"]) if rope_kind(known) == "llama3" else 1.0
        return super().sizes(known) | {"rope_factor": factor}

    @classmethod
    def contradictions(cls, known: Mapping[str, Any]) -> Iterator[str]:
        """See `ModelSpec.contradictions`."""
        yield from super().contradictions(known)
        kind, found = rope_kind(known), rope(known)
        for key in _SCALING:
            if (key in found) != (kind == "llama3"):
                yield (
                    f"rope_scaling.{key} is {found.get(key, 'missing')} beside the rope_type "
                    f"{kind!r}"
                )
        heads, hidden = known.get("num_attention_heads"), known.get("hidden_size")
        if (
            "head_dim" not in known
            and type(heads) is type(hidden) is int
            and heads > 0
            and hidden % (2 * heads)
        ):
            yield (
                f"hidden_size is {hidden}, supported without head_dim is a multiple of twice the "
                f"{heads} heads"
            )

    def rotary(self) -> dict[str, Any]:
        """See `ModelSpec.rotary`."""
        return super().rotary() | {
            "rope_scaling": self.rope_factor != 1.0,
            "rope_scaling_factor": self.rope_factor,
        }
