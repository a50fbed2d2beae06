"""A family whose queries, keys and values have biases, as Qwen2; relax_hpc has none that has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from relax_hpc.training.models.pieces import FusedParameter
from relax_hpc.training.models.spec import ModelSpec
from tests.helpers.convert_helpers import DENSE

BIASED = {key: value for key, value in DENSE.items() if key != "attention_bias"} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
}


@dataclass(frozen=True, kw_only=True)
class Qwen2(ModelSpec):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    required_keys = (*ModelSpec.required_keys, "num_key_value_heads", "head_dim")

    def attention_entries(
        self, ours: str, theirs: str, norms: Mapping[str, str]
    ) -> Iterator[FusedParameter]:
        for entry in super().attention_entries(ours, theirs, norms):
            yield entry
            if entry.fuse == "qkv":
                biases = [
                    replace(piece, name=piece.name.replace("weight", "bias"), shape=piece.shape[:1])
                    for piece in entry.pieces
                ]
                yield replace(
                    entry, name=entry.name.replace("weight", "bias"), pieces=tuple(biases)
                )

    def build(self, config: Any, *options: Any, **named: Any) -> Any:
        config.add_qkv_bias = True
        return super().build(config, *options, **named)
