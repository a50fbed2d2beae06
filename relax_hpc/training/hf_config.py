"""What of a Qwen3 config.json is understood; everything else is refused."""

from __future__ import annotations

from typing import Any

from relax_hpc.errors import ConfigError

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
_SIZES = ("num_key_value_heads", "head_dim", "num_experts", "num_local_experts")
"""That need not be there."""
_ONLY = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
_DENSE = ("intermediate_size",)
_MIXED = ("moe_intermediate_size", "num_experts_per_tok")
_ONLY_MIXED = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def check_supported(hf_config: dict[str, Any]) -> None:
    """ConfigError naming the key of config.json that the trainer does not know how to train."""
    _require(hf_config, _REQUIRED + _DENSE)
    _allow(hf_config, {"model_type": "qwen3", **_ONLY})
    _check_rope(hf_config)


def check_convertible(hf_config: dict[str, Any]) -> None:
    """As `check_supported`, for what can be converted: mixtures of experts too, if every layer is one."""
    if hf_config.get("model_type") != "qwen3_moe":
        return check_supported(hf_config)
    _require(hf_config, _REQUIRED + _MIXED)
    if not (hf_config.get("num_experts") or hf_config.get("num_local_experts")):
        raise ConfigError("config.json: num_experts is missing; is this a Qwen3 mixture of experts?")
    _allow(hf_config, {**_ONLY, **_ONLY_MIXED})
    _check_rope(hf_config)


def rope_theta(hf_config: dict[str, Any]) -> float:
    """Base of the rotary embedding, wherever this transformers release keeps it."""
    return float(_rope(hf_config).get("rope_theta") or hf_config.get("rope_theta") or 10000.0)


def _require(hf_config: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        if key not in hf_config:
            raise ConfigError(f"config.json: {key} is missing; is this a Qwen3 model?")
    for key in (*keys, *_SIZES):
        value = hf_config.get(key)
        if key != "rms_norm_eps" and value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"config.json: {key} is {value!r}, supported is a positive integer")
    heads, groups = hf_config["num_attention_heads"], hf_config.get("num_key_value_heads")
    if groups and heads % groups:
        raise ConfigError(f"config.json: num_key_value_heads is {groups}, supported is a divisor of {heads} heads")


def _allow(hf_config: dict[str, Any], only: dict[str, Any]) -> None:
    for key, allowed in only.items():
        if hf_config.get(key, allowed) != allowed:
            raise ConfigError(f"config.json: {key} is {hf_config[key]!r}, supported is {allowed!r}")


def _check_rope(hf_config: dict[str, Any]) -> None:
    kind = _rope(hf_config).get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"config.json: rope_type is {kind!r}, supported is 'default'")


def _rope(hf_config: dict[str, Any]) -> dict[str, Any]:
    return hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
