"""A model family outside of the package: a decoder whose queries, keys and values have biases."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from relax_hpc.training.models.pieces import FusedParameter
from relax_hpc.training.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class BiasedDecoder(ModelSpec):
    """Sizes, rules and names are those of `ModelSpec`, except for the biases.

    transformers has 32 as the default of num_key_value_heads, independent of the other sizes, so
    that the key is required.
    """

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    required_keys = (*ModelSpec.required_keys, "num_key_value_heads")

    def transformer(self, parallel: Any) -> dict[str, Any]:
        """Let megatron-core's linear layer of queries, keys and values have a bias."""
        return super().transformer(parallel) | {"add_qkv_bias": True}

    def attention_entries(
        self, ours: str, theirs: str, norms: Mapping[str, str]
    ) -> Iterator[FusedParameter]:
        """Add the fused bias, from one bias each of Hugging Face for queries, keys and values."""
        for entry in super().attention_entries(ours, theirs, norms):
            yield entry
            if entry.fuse == "qkv":
                # A bias has the rows of its matrix: shape [rows], split along the same axis 0.
                pieces = tuple(
                    replace(piece, name=as_bias(piece.name), shape=piece.shape[:1])
                    for piece in entry.pieces
                )
                yield replace(entry, name=as_bias(entry.name), pieces=pieces)


def as_bias(name: str) -> str:
    """The name of the bias that belongs to the weight ``name``."""
    return f"{name.removesuffix('weight')}bias"
