"""What is known of each family of models: the table by which `check`, the trainer and `convert` read a config.json.

A key of config.json is understood (its value is checked, and used), harmless (nothing that is trained depends on it),
or refused by name: a key that nobody here knows may change the arithmetic, and then the trained model is silently
another one than the engine serves. `model.ignore_keys` overrules. Null counts as absent, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relax_hpc.errors import ConfigError

Use = Literal["train", "convert"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that are understood of a key."""

    allowed: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one architecture, by the `model_type` of their config.json."""

    needed: tuple[str, ...]
    rules: Mapping[str, Rule]
    """Of keys that are understood; those of the rotary embedding's mappings as `rope_scaling.factor`."""
    uses: tuple[Use, ...]


def _one(value: Any) -> Rule:
    return Rule(repr(value), lambda found: found == value and isinstance(found, bool) == isinstance(value, bool))


_SIZE = Rule("a positive integer", lambda found: type(found) is int and found > 0)
_NUMBER = Rule("a positive number", lambda found: type(found) in (int, float) and 0 < found < 1e300)
_FLAG = Rule("true or false", lambda found: isinstance(found, bool))
_MAPPING = Rule("a mapping", lambda found: isinstance(found, dict))

_ROPE = ("rope_parameters", "rope_scaling")
"""Where transformers 5, and releases before it, keep the rotary embedding; a set `rope_scaling` wins in all of them."""
_ROPE_RULES = {
    "rope_theta": _NUMBER,
    **dict.fromkeys(_ROPE, _MAPPING),
    **{f"{name}.rope_theta": _NUMBER for name in _ROPE},
    # Both spellings, as in transformers: what is missed here is trained with the plain embedding.
    **{f"{name}.{key}": _one("default") for name in _ROPE for key in ("rope_type", "type")},
    **{f"{name}partial_rotary_factor": _one(1.0) for name in ("", *(f"{name}." for name in _ROPE))},
}


def _qwen3(architecture: str) -> dict[str, Rule]:
    return {
        "architectures": _one([architecture]),
        "vocab_size": _SIZE,
        "hidden_size": _SIZE,
        "num_hidden_layers": _SIZE,
        "num_attention_heads": _SIZE,
        "num_key_value_heads": _SIZE,
        "head_dim": _SIZE,
        "intermediate_size": _SIZE,
        "max_position_embeddings": _SIZE,
        "rms_norm_eps": _NUMBER,
        "initializer_range": _NUMBER,
        "tie_word_embeddings": _FLAG,
        "hidden_act": _one("silu"),
        "attention_bias": _one(False),
        "use_sliding_window": _one(False),
        "layer_types": Rule("'full_attention' for every layer", _is_full_attention),
        **_ROPE_RULES,
        # Of any architecture, by transformers' PretrainedConfig.
        "is_encoder_decoder": _one(False),
        "add_cross_attention": _one(False),
        "tie_encoder_decoder": _one(False),
        "pruned_heads": _one({}),
    }


def _is_full_attention(found: Any) -> bool:
    return isinstance(found, list) and all(kind == "full_attention" for kind in found)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
)
"""Without num_key_value_heads transformers takes 32 or 4, whatever the other sizes are, and without head_dim 128."""
FAMILIES = {
    "qwen3": Family((*_SIZES, "intermediate_size", "head_dim"), _qwen3("Qwen3ForCausalLM"), ("train", "convert")),
    "qwen3_moe": Family(
        (*_SIZES, "moe_intermediate_size", "num_experts_per_tok"),
        _qwen3("Qwen3MoeForCausalLM")
        | {
            "moe_intermediate_size": _SIZE,
            "num_experts": _SIZE,
            # As transformers 5 writes it.
            "num_local_experts": _SIZE,
            "num_experts_per_tok": _SIZE,
            "norm_topk_prob": _FLAG,
            "decoder_sparse_step": _one(1),
            "mlp_only_layers": _one([]),
        },
        ("convert",),
    ),
}
"""`model_type` -> what is known of it."""
_OVERRULES: dict[Use, str] = {"train": "model.ignore_keys", "convert": "--ignore-keys"}

_HARMLESS = {
    "about the file, and how weights are stored and run, which the run's settings decide": """
        _name_or_path transformers_version torch_dtype dtype use_cache use_bfloat16 torchscript tokenizer_class
        _attn_implementation _attn_implementation_autoset attn_implementation unsloth_version unsloth_fixed""",
    "token ids, which the tokenizer and the engines read": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id""",
    "what a forward pass returns beside logits": """
        output_attentions output_hidden_states return_dict chunk_size_feed_forward id2label label2id problem_type
        finetuning_task task_specific_params is_decoder tf_legacy_loss""",
    "dropout, and the router's own loss: no part of the function, and nothing here trains with them": """
        attention_dropout router_aux_loss_coef output_router_logits""",
    "of a window that `use_sliding_window` false leaves unused": "sliding_window max_window_layers",
    "how to generate, which the run's settings say": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
        top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
        bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
        forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens prefix""",
}
"""Why nothing that is trained depends on them -> keys."""
HARMLESS = frozenset(key for keys in _HARMLESS.values() for key in keys.split())
"""Keys that any config.json may have, whatever their values."""


def understood(hf_config: Mapping[str, Any], ignore_keys: Collection[str] = (), use: Use = "train") -> dict[str, Any]:
    """The content of config.json without what is null or to be ignored. ConfigError naming all that is not known."""
    if found := list(problems(hf_config, ignore_keys, use)):
        raise ConfigError(f"config.json: {'; '.join(found)}")
    return _without(hf_config, ignore_keys)


def problems(hf_config: Mapping[str, Any], ignore_keys: Collection[str] = (), use: Use = "train") -> Iterator[str]:
    """What is missing, not supported or unknown in the content of config.json, one line a key."""
    known = _without(hf_config, ignore_keys)
    allowed = [name for name, family in FAMILIES.items() if use in family.uses]
    kind = known.get("model_type")
    if kind not in allowed:
        yield f"model_type is {_shown(kind)}, supported to {use}: {', '.join(allowed)}"
        return
    family = FAMILIES[kind]
    for key in family.needed:
        if key not in known:
            yield f"{key} is missing; is this a {kind} model?"
    for key, value in _flat(known):
        rule = family.rules.get(key)
        if key == "model_type" or key in HARMLESS:
            continue
        if rule is None:
            yield f"{key} is {_shown(value)}, which is not known here; {_OVERRULES[use]} takes it for harmless"
        elif not rule.fits(value):
            yield f"{key} is {_shown(value)}, supported is {rule.allowed}"
    yield from _relations(known)
    if place := _null_rope_theta(_without(hf_config, ignore_keys, nulls=True)):
        yield f"{place} is null, with which no engine starts; say what it is (1000000 in published models)"


def rope_theta(hf_config: Mapping[str, Any]) -> float:
    """Base of the rotary embedding, wherever this transformers release keeps it.

    10000 where it is missing: so take it transformers 5 and, with its configuration, SGLang 0.5.21.
    """
    return float(_rope(hf_config).get("rope_theta") or hf_config.get("rope_theta") or 10000.0)


def _null_rope_theta(whole: Mapping[str, Any]) -> str:
    """Which key keeps transformers from taking its default; a null that another value stands beside does not count."""
    found = next((name for name in reversed(_ROPE) if whole.get(name)), "")
    inside = whole[found] if found and isinstance(whole[found], dict) else {}
    place, holder = (f"{found}.rope_theta", inside) if "rope_theta" in inside else ("rope_theta", whole)
    return place if "rope_theta" in holder and holder["rope_theta"] is None else ""


def _relations(known: Mapping[str, Any]) -> Iterator[str]:
    """Keys that contradict each other, as far as each by itself is in order."""
    heads, groups, dim = (known.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if _SIZE.fits(heads) and _SIZE.fits(groups) and heads % groups:
        yield f"num_key_value_heads is {groups}, supported is a divisor of {heads} heads"
    if _SIZE.fits(dim) and dim % 2:
        yield f"head_dim is {dim}, supported are even numbers (rotary embedding)"
    kinds, layers = known.get("layer_types"), known.get("num_hidden_layers")
    if isinstance(kinds, list) and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries, supported is one for each of num_hidden_layers, {layers}"
    experts = [known[key] for key in ("num_experts", "num_local_experts") if key in known]
    if known["model_type"] == "qwen3_moe" and len({*map(str, experts)}) != 1:
        yield f"num_experts is {' and '.join(map(str, experts)) or 'missing'}; is this a qwen3_moe model?"
    if all(known.get(name) for name in _ROPE) and known[_ROPE[0]] != known[_ROPE[1]]:
        yield f"{_ROPE[1]} is {_shown(known[_ROPE[1]])} beside another {_ROPE[0]}, supported is one of them"
    bases = [base for base in (known.get("rope_theta"), _rope(known).get("rope_theta")) if _NUMBER.fits(base)]
    if len({*bases}) > 1:
        yield f"rope_theta is {bases[0]}, and {bases[1]} in a mapping of the rotary embedding; keep one"


def _rope(known: Mapping[str, Any]) -> Mapping[str, Any]:
    found = known.get("rope_scaling") or known.get("rope_parameters") or {}
    return found if isinstance(found, dict) else {}


def _flat(known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, those of the rotary embedding's mappings beside them."""
    for key, value in known.items():
        yield key, value
        if key in _ROPE and isinstance(value, dict):
            yield from ((f"{key}.{name}", item) for name, item in value.items())


def _without(hf_config: Mapping[str, Any], ignore_keys: Collection[str], nulls: bool = False) -> dict[str, Any]:
    """``hf_config`` without ``ignore_keys``, which may lie inside of a mapping, as `rope_scaling.factor`, and, unless
    they are wanted, ``nulls``."""

    def kept(mapping: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        wanted = {key: one for key, one in mapping.items() if f"{prefix}{key}" not in ignore_keys}
        return {key: one for key, one in wanted.items() if nulls or one is not None}

    left = kept(hf_config, "")
    return left | {key: kept(left[key], f"{key}.") for key in _ROPE if isinstance(left.get(key), dict)}


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
