"""Families of models. `check`, the trainer and `convert` read a config.json by this table.

Each key of config.json is supported (its value is checked and used), harmless (no trained value
depends on it), or refused by name. An unknown key may change the arithmetic, so that the trained
model would silently differ from the model that the engine serves. `model.ignore_keys` accepts it
nevertheless. Null counts as absent if transformers treats it so. If transformers does not load such
a file, null is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.base.plugins import load_plugin
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

_FAMILIES: tuple[type[ModelSpec] | str, ...] = (
    Qwen3,
    Qwen3Moe,
    Llama,
    Qwen3VL,
    Qwen3VLMoe,
    Qwen3OmniMoe,
    Qwen3OmniMoeThinker,
)
"""Classes of families, or their import paths as `package.module:Class`. To add one, write a class
in a file of any package, and add its import path here. docs/reference/towers.md describes the work
for Qwen3.5."""


def _load_family(family: type[ModelSpec] | str) -> type[ModelSpec]:
    """The class of ``family``, which may be an import path. ConfigError: it cannot be imported."""
    if isinstance(family, str):
        # The name of an entry in a table, because commands that only read runs must import it too.
        return load_plugin("FAMILIES", "family", {"family": family})
    return family


FAMILIES = {family.model_type: family for family in map(_load_family, _FAMILIES)}
"""Families by `model_type`."""
_OVERRULES: dict[Use, str] = {"train": "model.ignore_keys", "convert": "--ignore-keys"}

# Reason why no trained value depends on some keys -> those keys.
_HARMLESS = {
    "describe the file, or how weights are stored and run, which the run's settings decide": """
        model_type _name_or_path transformers_version torch_dtype dtype use_cache use_bfloat16
        torchscript tokenizer_class _attn_implementation _attn_implementation_autoset
        attn_implementation unsloth_version unsloth_fixed""",
    "token ids, which the tokenizer and the engines read": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id""",
    "outputs of a forward pass other than logits": """
        output_attentions output_hidden_states return_dict chunk_size_feed_forward id2label label2id
        problem_type finetuning_task task_specific_params is_decoder tf_legacy_loss""",
    "dropout and the router's loss, which this trainer does not use": """
        attention_dropout router_aux_loss_coef output_router_logits""",
    "a window that is unused if `use_sliding_window` is false": "sliding_window max_window_layers",
    "generation, which the run's settings decide": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
        return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix""",
}
HARMLESS = frozenset(" ".join(_HARMLESS.values()).split())
"""Keys that any config.json may have, with any value, unless a family has a rule for one."""

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
# Keys for which transformers 5.12 does not load null in at least one family, because the type of
# the field is not optional.
_NOT_NULL = frozenset(_NOT_NULL_KEYS.split())
# Further such keys by `model_type`. Other families load null for them.
_NOT_NULL_IN = {"qwen3": frozenset(["head_dim"]), "qwen3_vl": frozenset(["head_dim"])}


def checked_config(
    hf_config: Mapping[str, Any], ignore_keys: Collection[str] = (), use: Use = "train"
) -> dict[str, Any]:
    """The content of config.json without nulls and ``ignore_keys``. ConfigError lists all its
    `config_problems`."""
    problems = list(config_problems(hf_config, ignore_keys, use))
    if problems:
        raise ConfigError(f"config.json: {'; '.join(problems)}")
    return _without(hf_config, ignore_keys)


def spec_from_config(
    hf_config: Mapping[str, Any], ignore_keys: Collection[str] = (), use: Use = "train"
) -> ModelSpec:
    """The model that config.json describes. ConfigError as in `checked_config`."""
    config = checked_config(hf_config, ignore_keys, use)
    return FAMILIES[config["model_type"]].from_config(config)


def route_shape_of_model(directory: Path, model: ModelConfig) -> RouteShape | None:
    """Shape of the routes that come with the tokens of a run whose model is in ``directory``.

    None: the run has no routes. ConfigError as in `checked_config`.
    """
    if model.routing_replay == "off":
        return None
    return spec_from_config(
        read_json_object(directory / "config.json"), model.ignore_keys
    ).route_shape


def config_problems(
    hf_config: Mapping[str, Any], ignore_keys: Collection[str] = (), use: Use = "train"
) -> Iterator[str]:
    """Problems of the content of config.json, one line each: keys that are missing, unknown or have
    values that are not supported."""
    config = _without(hf_config, ignore_keys)
    allowed = [name for name, family in FAMILIES.items() if use in family.uses]
    model_type = config.get("model_type")
    if model_type not in allowed:
        yield f"model_type is {_shown(model_type)}, supported to {use}: {', '.join(allowed)}"
        return
    # Nulls are checked separately: most of them count as absent.
    with_nulls = _without(hf_config, ignore_keys, keep_nulls=True)
    for prefix, section in FAMILIES[model_type].sections().items():
        mapping = _mapping_at(config, prefix)
        if not mapping:
            continue
        nullable = _mapping_at(with_nulls, prefix)
        problems = [
            *_null_problems(model_type, nullable),
            *_section_problems(section, model_type, mapping, use),
            *_rope_theta_problems(nullable),
        ]
        for line in problems:
            # Keys of a foreign file may contain line breaks or control characters.
            yield escape_line(f"{prefix}{line}")


def _mapping_at(config: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """Nested mapping of ``config`` under a ``prefix`` such as `text_config.`; empty if missing."""
    mapping: Any = config
    for key in prefix.split(".")[:-1]:
        mapping = mapping.get(key)
        if not isinstance(mapping, dict):
            return {}
    return dict(mapping)


def _section_problems(
    section: Section, model_type: str, mapping: Mapping[str, Any], use: Use
) -> Iterator[str]:
    """Problems of one mapping of a config.json, which has no nulls."""
    for key in section.required_keys:
        if key not in mapping:
            yield f"{key} is missing; is this a {model_type} model?"
    for key, value in _flat_items(mapping):
        rule = section.rules.get(key)
        if rule is None and key in HARMLESS:
            continue
        if rule is None:
            yield (
                f"{key} is {_shown(value)}, an unknown key; {_OVERRULES[use]} treats it as harmless"
            )
        elif not rule.fits(value):
            yield f"{key} is {_shown(value)}, supported is {rule.allowed}"
    yield from section.contradictions(mapping)


def _null_problems(model_type: str, mapping: Mapping[str, Any]) -> Iterator[str]:
    """Nulls of one mapping of a config.json that transformers does not load."""
    not_null = _NOT_NULL | _NOT_NULL_IN.get(model_type, frozenset())
    for key, value in mapping.items():
        if value is None and key in not_null:
            yield (
                f"{key} is null, which transformers 5 does not load; give the published value, "
                "or remove the key"
            )


def _rope_theta_problems(mapping: Mapping[str, Any]) -> Iterator[str]:
    key = _null_rope_theta(mapping)
    if key:
        yield f"{key} is null, with which no engine starts; give the value of the published model"


def _null_rope_theta(mapping: Mapping[str, Any]) -> str:
    """Key of a null `rope_theta`, which prevents the default of transformers; empty if it has none.

    A null in the mapping of the rotary embedding has priority over the key outside of it.
    """
    name = next((name for name in reversed(ROPE) if mapping.get(name)), "")
    rope = mapping[name] if name and isinstance(mapping[name], dict) else {}
    if "rope_theta" in rope:
        key, holder = f"{name}.rope_theta", rope
    else:
        key, holder = "rope_theta", mapping
    return key if "rope_theta" in holder and holder["rope_theta"] is None else ""


def _flat_items(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values. Those of the rotary embedding's mappings follow as `rope_scaling.factor`."""
    for key, value in mapping.items():
        yield key, value
        if key in ROPE and isinstance(value, dict):
            for name, item in value.items():
                yield f"{key}.{name}", item


def _without(
    hf_config: Mapping[str, Any], ignore_keys: Collection[str], keep_nulls: bool = False
) -> dict[str, Any]:
    """``hf_config`` without ``ignore_keys`` and, unless ``keep_nulls``, without nulls.

    A key of a nested mapping is written as `rope_scaling.factor`.
    """

    def filtered(mapping: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result = {}
        for key, value in mapping.items():
            if f"{prefix}{key}" in ignore_keys or (value is None and not keep_nulls):
                continue
            result[key] = filtered(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        return result

    return filtered(hf_config, "")


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
