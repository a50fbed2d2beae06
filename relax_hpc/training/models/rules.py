"""Rules for supported values of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """Supported values of a key."""

    allowed: str
    fits: Callable[[Any], bool]


def _none(_: Mapping[str, Any]) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, slots=True)
class Section:
    """Rules for one mapping of config.json: the whole file, or the mapping of a model part."""

    rules: Mapping[str, Rule]
    """Rules for supported values, by key."""
    required_keys: tuple[str, ...] = ()
    """Keys that the mapping must have."""
    contradictions: Callable[[Mapping[str, Any]], Iterator[str]] = _none
    """Contradictions between keys whose values are valid separately, one line each."""


def one_of(*values: Any) -> Rule:
    """Any of ``values``. True and 1 are different values."""

    def fits(candidate: Any) -> bool:
        is_flag = isinstance(candidate, bool)
        return any(candidate == value and is_flag == isinstance(value, bool) for value in values)

    return Rule(" or ".join(map(repr, values)), fits)


def at_most(limit: int) -> Rule:
    """Positive integers up to ``limit``."""
    return Rule(
        f"a positive integer, at most {limit}",
        lambda value: type(value) is int and 0 < value <= limit,
    )


MAX_LAYERS, MAX_EXPERTS = 1024, 4096
"""Limits for the layers of a model or tower, and for the experts of a layer. Published models have
at most 128 and 512. Each layer and expert has at least one tensor name, so a config.json with a
million of them would take very long to check."""
MAX_LAYER_EXPERTS = 1 << 17
"""Limit for the experts of all layers together. Published models have at most 30,000."""
LAYERS, EXPERTS = at_most(MAX_LAYERS), at_most(MAX_EXPERTS)
SIZE = at_most((1 << 31) - 1)
TOKEN = Rule("a token id, 0 or more", lambda value: type(value) is int and value >= 0)
NUMBER = Rule("a positive number", lambda value: type(value) in (int, float) and 0 < value < 1e300)
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
MAPPING = Rule("a mapping", lambda value: isinstance(value, dict))

ROPE = ("rope_parameters", "rope_scaling")
"""Keys for the rotary embedding in transformers 5 and in earlier releases. If both are set,
`rope_scaling` has priority."""


def rope(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping that describes the rotary embedding; empty: only `rope_theta` does."""
    mapping = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    return mapping if isinstance(mapping, dict) else {}


def rope_theta(hf_config: Mapping[str, Any]) -> float:
    """Base of the rotary embedding, in any place where a transformers release stores it.

    The default is 10000, as in transformers 5 and in SGLang 0.5.21, which uses its configuration.
    """
    return float(rope(hf_config).get("rope_theta") or hf_config.get("rope_theta") or 10000.0)


def rope_kind(hf_config: Mapping[str, Any]) -> str:
    """The `rope_type`, "default" if missing. Both spellings count, as in transformers."""
    mapping = rope(hf_config)
    return str(mapping.get("rope_type") or mapping.get("type") or "default")


def _is_full_attention(value: Any) -> bool:
    return isinstance(value, list) and all(kind == "full_attention" for kind in value)


ANYWHERE = {
    "is_encoder_decoder": one_of(False),
    "add_cross_attention": one_of(False),
    "tie_encoder_decoder": one_of(False),
    "pruned_heads": one_of({}),
}
"""Rules for keys that transformers' PretrainedConfig allows in any mapping that describes a model
or a part of one."""

_ROPE_RULES = {
    **{f"{name}.rope_theta": NUMBER for name in ROPE},
    # Both spellings, as in transformers. With another type the model would silently be trained with
    # the plain embedding.
    **{f"{name}.rope_type": one_of("default") for name in ROPE},
    **{f"{name}.type": one_of("default") for name in ROPE},
    "partial_rotary_factor": one_of(1.0),
    **{f"{name}.partial_rotary_factor": one_of(1.0) for name in ROPE},
}

DECODER = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": SIZE,
    "intermediate_size": SIZE,
    "max_position_embeddings": SIZE,
    "rms_norm_eps": NUMBER,
    "initializer_range": NUMBER,
    "tie_word_embeddings": FLAG,
    "hidden_act": one_of("silu"),
    "attention_bias": one_of(False),
    "use_sliding_window": one_of(False),
    "layer_types": Rule("'full_attention' for every layer", _is_full_attention),
    "rope_theta": NUMBER,
    **dict.fromkeys(ROPE, MAPPING),
    **_ROPE_RULES,
    **ANYWHERE,
}
"""Rules for keys that any decoder with full attention may have. Keys of the rotary embedding's
mappings are written as `rope_scaling.factor`."""
