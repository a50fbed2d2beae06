"""Rules for the values of keys of config.json that are understood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that are understood of a key."""

    allowed: str
    fits: Callable[[Any], bool]


def _none(_: Mapping[str, Any]) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, slots=True)
class Section:
    """Rules for one mapping of config.json: the whole of it, or that of a part of the model."""

    rules: Mapping[str, Rule]
    """Rules for the values that are understood, by key."""
    needed: tuple[str, ...] = ()
    """Keys that it must have."""
    contradictions: Callable[[Mapping[str, Any]], Iterator[str]] = _none
    """Contradictions between keys that are each in order, one line each."""


def one_of(*values: Any) -> Rule:
    """Any of ``values``, true and 1 being different ones."""

    def fits(found: Any) -> bool:
        return any(
            found == value and isinstance(found, bool) == isinstance(value, bool)
            for value in values
        )

    return Rule(" or ".join(map(repr, values)), fits)


def at_most(limit: int) -> Rule:
    """Positive integers up to ``limit``."""
    return Rule(
        f"a positive integer, at most {limit}",
        lambda found: type(found) is int and 0 < found <= limit,
    )


MAX_LAYERS, MAX_EXPERTS = 1024, 4096
"""Layers of a model or of a tower, and experts of a layer. Published models have 128 and 512 of
them at most. Each is a name or more, so that a config.json with a million would keep whoever reads
it busy."""
MAX_LAYER_EXPERTS = 1 << 17
"""Experts of all layers together; published models have 30,000 at most."""
LAYERS, EXPERTS = at_most(MAX_LAYERS), at_most(MAX_EXPERTS)
SIZE = at_most((1 << 31) - 1)
TOKEN = Rule("a token id, 0 or more", lambda found: type(found) is int and found >= 0)
NUMBER = Rule("a positive number", lambda found: type(found) in (int, float) and 0 < found < 1e300)
FLAG = Rule("true or false", lambda found: isinstance(found, bool))
MAPPING = Rule("a mapping", lambda found: isinstance(found, dict))

ROPE = ("rope_parameters", "rope_scaling")
"""Keys under which transformers 5, and releases before it, keep the rotary embedding; a set
`rope_scaling` wins."""


def rope(known: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping that says how positions are rotated; empty: nothing but `rope_theta` does."""
    found = known.get("rope_scaling") or known.get("rope_parameters") or {}
    return found if isinstance(found, dict) else {}


def rope_theta(known: Mapping[str, Any]) -> float:
    """Base of the rotary embedding, wherever this transformers release keeps it.

    10000 where it is missing: so take it transformers 5 and, with its configuration, SGLang 0.5.21.
    """
    return float(rope(known).get("rope_theta") or known.get("rope_theta") or 10000.0)


def rope_kind(known: Mapping[str, Any]) -> str:
    """ "default", or another name by `rope_type`; both spellings count, as in transformers."""
    found = rope(known)
    return str(found.get("rope_type") or found.get("type") or "default")


def _is_full_attention(found: Any) -> bool:
    return isinstance(found, list) and all(kind == "full_attention" for kind in found)


ANYWHERE = {
    "is_encoder_decoder": one_of(False),
    "add_cross_attention": one_of(False),
    "tie_encoder_decoder": one_of(False),
    "pruned_heads": one_of({}),
}
"""Rules for keys that any mapping may have that describes a model or a part of one, by
transformers' PretrainedConfig."""

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
    **{f"{name}.rope_theta": NUMBER for name in ROPE},
    # Both spellings, as in transformers: what is missed here is trained with the plain embedding.
    **{f"{name}.{key}": one_of("default") for name in ROPE for key in ("rope_type", "type")},
    **{
        f"{name}partial_rotary_factor": one_of(1.0) for name in ("", *(f"{name}." for name in ROPE))
    },
    **ANYWHERE,
}
"""Keys that any decoder with full attention may have, and what of them is understood; those of the
rotary embedding's mappings as `rope_scaling.factor`."""
