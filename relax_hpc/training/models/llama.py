"""Llama 2 and 3. From 3.1 on, low rotary frequencies are scaled. arXiv 2307.09288, 2407.21783."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from relax_hpc.training.models.rules import NUMBER, ROPE, Rule, one_of, rope, rope_kind
from relax_hpc.training.models.spec import ModelSpec

# Rules for the scaling of the rotary embedding. All published models have these values; megatron-
# core 0.16.1 supports no others.
_SCALING = {
    "factor": NUMBER,
    "low_freq_factor": one_of(1.0),
    "high_freq_factor": one_of(4.0),
    "original_max_position_embeddings": one_of(8192),
}
_ROPE_RULES: dict[str, Rule] = {}
for _name in ROPE:
    _ROPE_RULES |= {f"{_name}.{key}": one_of("default", "llama3") for key in ("rope_type", "type")}
    _ROPE_RULES |= {f"{_name}.{key}": rule for key, rule in _SCALING.items()}


@dataclass(frozen=True, kw_only=True)
class Llama(ModelSpec):
    """Llama. The defaults of num_key_value_heads and head_dim follow from the heads."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    extra_rules: ClassVar[Mapping[str, Rule]] = {
        "mlp_bias": one_of(False),
        "pretraining_tp": one_of(1),
        **_ROPE_RULES,
    }

    rope_factor: float = 1.0
    """Factor by which low rotary frequencies are divided; 1: no scaling."""

    @classmethod
    def sizes(cls, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`."""
        factor = float(rope(hf_config)["factor"]) if rope_kind(hf_config) == "llama3" else 1.0
        return super().sizes(hf_config) | {"rope_factor": factor}

    @classmethod
    def contradictions(cls, hf_config: Mapping[str, Any]) -> Iterator[str]:
        """See `ModelSpec.contradictions`."""
        yield from super().contradictions(hf_config)
        kind, mapping = rope_kind(hf_config), rope(hf_config)
        for key in _SCALING:
            if (key in mapping) != (kind == "llama3"):
                value = mapping.get(key, "missing")
                yield f"rope_scaling.{key} is {value} with the rope_type {kind!r}"
        if "head_dim" in hf_config:
            return
        heads, hidden = hf_config.get("num_attention_heads"), hf_config.get("hidden_size")
        if type(heads) is int and type(hidden) is int and heads > 0 and hidden % (2 * heads):
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
