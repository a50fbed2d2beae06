"""Families of models: the table by which `check`, the trainer and `convert` read a config.json.

A key of config.json is checked_config (its value is checked, and used), harmless (nothing that is
trained depends on it), or refused by name: a key that nobody here knows may change the arithmetic,
and then the trained model is silently another one than the engine serves. `model.ignore_keys`
overrules. Null counts as absent where transformers takes it so; where it does not load such a file,
null is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.base.routes import RouteShape
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.training.models.llama import Llama
from relax_hpc.training.models.qwen3 import Qwen3
from relax_hpc.training.models.qwen3_moe import Qwen3Moe
from relax_hpc.training.models.qwen3_omni_moe import Qwen3OmniMoe, Qwen3OmniMoeThinker
from relax_hpc.training.models.qwen3_vl import Qwen3VL
from relax_hpc.training.models.qwen3_vl_moe import Qwen3VLMoe
from relax_hpc.training.models.rules import ROPE, Section
from relax_hpc.training.models.spec import ModelSpec, Use

if TYPE_CHECKING:
    from relax_hpc.config.schema import ModelConfig

_FAMILIES: tuple[type[ModelSpec], ...] = (
    Qwen3,
    Qwen3Moe,
    Llama,
    Qwen3VL,
    Qwen3VLMoe,
    Qwen3OmniMoe,
    Qwen3OmniMoeThinker,
)
FAMILIES = {family.model_type: family for family in _FAMILIES}
"""Families by `model_type`. A new one is a class in a file of its own, and its name here; what
Qwen3.5 would take is in docs/reference/towers.md."""
_OVERRULES: dict[Use, str] = {"train": "model.ignore_keys", "convert": "--ignore-keys"}

_HARMLESS = {
    "about the file, and how weights are stored and run, which the run's settings decide": """
        model_type _name_or_path transformers_version torch_dtype dtype use_cache use_bfloat16
        torchscript tokenizer_class _attn_implementation _attn_implementation_autoset
        attn_implementation unsloth_version unsloth_fixed""",
    "token ids, which the tokenizer and the engines read": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id""",
    "what a forward pass returns beside logits": """
        output_attentions output_hidden_states return_dict chunk_size_feed_forward id2label label2id
        problem_type finetuning_task task_specific_params is_decoder tf_legacy_loss""",
    (
        "dropout, and the router's own loss: no part of the function, and nothing here trains with "
        "them"
    ): """
        attention_dropout router_aux_loss_coef output_router_logits""",
    "of a window that `use_sliding_window` false leaves unused": "sliding_window max_window_layers",
    "how to generate, which the run's settings say": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
        return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix""",
}
"""Reason why nothing that is trained depends on keys -> those keys."""
HARMLESS = frozenset(key for keys in _HARMLESS.values() for key in keys.split())
"""Keys that any config.json may have, whatever their values, unless a family has a rule for one."""

_NOT_NULL_KEYS = """
    activation_dropout activation_function assistant_token_id attention_bias attention_dropout
    audio_start_token_id audio_token_id chunk_size_feed_forward conv_chunksize d_model
    decoder_sparse_step deepstack_visual_indexes depth downsample_hidden_size dropout
    enable_audio_output encoder_attention_heads encoder_ffn_dim encoder_layers hidden_act
    hidden_size im_end_token_id im_start_token_id image_token_id in_channels initializer_range
    intermediate_size is_encoder_decoder max_position_embeddings max_source_positions
    max_window_layers mlp_bias moe_intermediate_size n_window n_window_infer norm_topk_prob
    num_attention_heads num_experts num_experts_per_tok num_heads num_mel_bins
    num_position_embeddings out_hidden_size output_dim output_router_logits patch_size
    position_id_per_seconds rms_norm_eps router_aux_loss_coef scale_embedding spatial_merge_size
    system_token_id temporal_patch_size tie_word_embeddings tts_bos_token_id tts_eos_token_id
    tts_pad_token_id use_cache use_sliding_window user_token_id video_token_id vision_end_token_id
    vision_start_token_id vocab_size"""
_NOT_NULL = frozenset(_NOT_NULL_KEYS.split())
"""Keys whose null transformers 5.12 does not load in one family or more, as the type of its field
is not optional."""
_NOT_NULL_IN = {"qwen3": frozenset(["head_dim"]), "qwen3_vl": frozenset(["head_dim"])}
"""Further such keys by `model_type`; others load them."""


def checked_config(
    hf_config: Mapping[str, Any], ignore_keys: Collection[str] = (), use: Use = "train"
) -> dict[str, Any]:
    """The content of config.json without what is null or to be ignored. ConfigError naming all that
    is not known."""
    if found := list(config_problems(hf_config, ignore_keys, use)):
        raise ConfigError(f"config.json: {'; '.join(found)}")
    return _without(hf_config, ignore_keys)


def spec_from_config(
    hf_config: Mapping[str, Any], ignore_keys: Collection[str] = (), use: Use = "train"
) -> ModelSpec:
    """The model that config.json describes. ConfigError as `checked_config`."""
    known = checked_config(hf_config, ignore_keys, use)
    return FAMILIES[known["model_type"]].from_config(known)


def route_shape_of_model(directory: Path, model: ModelConfig) -> RouteShape | None:
    """Shape of the routes that come with the tokens of a run whose model is in ``directory``; None:
    none come.

    ConfigError as `checked_config`."""
    if model.routing_replay == "off":
        return None
    return spec_from_config(
        read_json_object(directory / "config.json"), model.ignore_keys
    ).route_shape


def config_problems(
    hf_config: Mapping[str, Any], ignore_keys: Collection[str] = (), use: Use = "train"
) -> Iterator[str]:
    """Mistakes in the content of config.json: keys that are missing, not supported or unknown, one
    line each."""
    known = _without(hf_config, ignore_keys)
    allowed = [name for name, family in FAMILIES.items() if use in family.uses]
    kind = known.get("model_type")
    if kind not in allowed:
        yield f"model_type is {_shown(kind)}, supported to {use}: {', '.join(allowed)}"
        return
    with_nulls = _without(hf_config, ignore_keys, nulls=True)
    for place, section in FAMILIES[kind].sections().items():
        if found := _at(known, place):
            whole = _at(with_nulls, place)
            for line in (
                *_nulls(kind, whole),
                *_mistakes(section, kind, found, use),
                *_null_base(whole),
            ):
                # Keys are foreign text.
                yield escape_line(f"{place}{line}")


def _at(mapping: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Mapping inside of another at a ``place`` such as `text_config.`; empty: there is none."""
    found: Any = mapping
    for key in place.split(".")[:-1]:
        found = found.get(key)
        if not isinstance(found, dict):
            return {}
    return dict(found)


def _mistakes(section: Section, kind: str, known: Mapping[str, Any], use: Use) -> Iterator[str]:
    """Mistakes in one mapping of the config.json of a model of ``kind``."""
    for key in section.needed:
        if key not in known:
            yield f"{key} is missing; is this a {kind} model?"
    for key, value in _flat(known):
        rule = section.rules.get(key)
        if rule is None and key in HARMLESS:
            continue
        if rule is None:
            yield (
                f"{key} is {_shown(value)}, which is not known here; {_OVERRULES[use]} takes it "
                "for harmless"
            )
        elif not rule.fits(value):
            yield f"{key} is {_shown(value)}, supported is {rule.allowed}"
    yield from section.contradictions(known)


def _nulls(kind: str, whole: Mapping[str, Any]) -> Iterator[str]:
    """Mistakes in the nulls of one mapping of the config.json of a model of ``kind``."""
    not_null = _NOT_NULL | _NOT_NULL_IN.get(kind, frozenset())
    for key, value in whole.items():
        if value is None and key in not_null:
            yield (
                f"{key} is null, which transformers 5 does not load; give the published value, "
                "or remove the key"
            )


def _null_base(whole: Mapping[str, Any]) -> Iterator[str]:
    if place := _null_rope_theta(whole):
        yield (
            f"{place} is null, with which no engine starts; say what it is, as the published "
            "model does"
        )


def _null_rope_theta(whole: Mapping[str, Any]) -> str:
    """Key whose null keeps transformers from taking its default, or empty; a null with another
    value beside it does not count."""
    found = next((name for name in reversed(ROPE) if whole.get(name)), "")
    inside = whole[found] if found and isinstance(whole[found], dict) else {}
    place, holder = (
        (f"{found}.rope_theta", inside) if "rope_theta" in inside else ("rope_theta", whole)
    )
    return place if "rope_theta" in holder and holder["rope_theta"] is None else ""


def _flat(known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, those of the rotary embedding's mappings beside them."""
    for key, value in known.items():
        yield key, value
        if key in ROPE and isinstance(value, dict):
            yield from ((f"{key}.{name}", item) for name, item in value.items())


def _without(
    hf_config: Mapping[str, Any], ignore_keys: Collection[str], nulls: bool = False
) -> dict[str, Any]:
    """``hf_config`` without ``ignore_keys``, which may lie inside of a mapping, as
    `rope_scaling.factor`, and, unless they are wanted, ``nulls``."""

    def kept(mapping: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        wanted = {key: one for key, one in mapping.items() if f"{prefix}{key}" not in ignore_keys}
        return {
            key: kept(one, f"{prefix}{key}.") if isinstance(one, dict) else one
            for key, one in wanted.items()
            if nulls or one is not None
        }

    return kept(hf_config, "")


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
