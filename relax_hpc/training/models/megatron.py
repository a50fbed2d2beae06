"""Construction of megatron-core's transformer configuration from a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Experts, ModelConfig, ParallelConfig, TrainerConfig
from relax_hpc.training.models import megatron_settings
from relax_hpc.training.models.expert_grouping import grouping_errors, groups_experts
from relax_hpc.training.models.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NONE: Mapping[str, Any] = MappingProxyType({})
# Errors by which megatron-core 0.16.1 refuses settings of its transformer configuration.
_REFUSALS = (AssertionError, ValueError, TypeError, ImportError)
_FUSION_OFF = {
    # Fused kernels that need Apex or a compiler. For our kernels see
    # `relax_hpc.training.models.kernels`.
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}


def check_split(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """ConfigError if the model cannot be split as `parallel` describes."""
    for error in spec.split_errors(parallel):
        raise ConfigError(f"parallel.{error}")


def check_frozen(spec: ModelSpec, model: ModelConfig) -> None:
    """ConfigError if the model lacks a tower of `model.frozen_towers`."""
    for error in spec.frozen_tower_errors(model.frozen_towers):
        raise ConfigError(f"model.{error}")


def training_settings(actor: TrainerConfig, experts: bool) -> dict[str, Any]:
    """Settings of megatron-core's transformer configuration for a model that is trained.

    ``experts``: whether its layers have experts. ConfigError: a setting is not allowed.
    """
    errors = list(megatron_settings.setting_errors(actor))
    if errors:
        raise ConfigError(*errors)
    recompute_settings: dict[str, dict[str, Any]] = {
        "none": {},
        # Attention scores are never stored, and attention's result is small. The large tensors are
        # between the two matrices of the feed-forward part.
        "selective": {"recompute_modules": ["layernorm", "moe" if experts else "mlp"]},
        "full": {"recompute_method": "uniform", "recompute_num_layers": 1},
    }
    recompute = recompute_settings[actor.recompute]
    granularity = None if actor.recompute == "none" else actor.recompute
    chosen = megatron_settings.owner_settings(actor, "transformer")
    return {"recompute_granularity": granularity, **recompute, **chosen}


def expert_settings(
    choice: Experts, spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig
) -> dict[str, Any]:
    """Settings of megatron-core's transformer configuration that ``choice``, `actor.experts`,
    decides.

    ConfigError: it is `grouped`, which does not run with these settings.
    """
    errors = list(grouping_errors(spec, model, parallel)) if choice == "grouped" else []
    if errors:
        raise ConfigError(*(f"actor.{error}" for error in errors))
    return {"moe_grouped_gemm": groups_experts(choice, spec, model, parallel)}


def transformer_config(
    spec: ModelSpec,
    model: ModelConfig,
    parallel: ParallelConfig,
    further: Mapping[str, Any] = _NONE,
) -> TransformerConfig:
    """megatron-core's configuration of the model, split as `parallel` describes, in the run's
    parameter type.

    The family of the model overrides standard settings, and ``further`` settings override both.
    ConfigError: megatron-core refuses a setting of the family, or ``further`` settings.
    """
    standard, family = _standard_settings(spec, model, parallel), spec.transformer(parallel)
    try:
        return TransformerConfig(**standard | family | dict(further))
    except _REFUSALS as error:
        refusal = _refusal(standard | family)
        if not refusal:
            raise ConfigError(
                f"actor.megatron: megatron-core refuses it with the other settings: {error}"
            ) from error
        names = _refused_settings(standard, family)
        if not names:
            raise
        settings = ", ".join(f"{name}={family[name]!r}" for name in names)
        raise ConfigError(
            f"model family {type(spec).__module__}.{type(spec).__qualname__}: megatron-core "
            f"refuses what its method transformer() sets ({settings}): {refusal}; correct it there"
        ) from error


def _refusal(settings: Mapping[str, Any]) -> str:
    """megatron-core's error message for ``settings``; empty if it accepts them."""
    try:
        TransformerConfig(**settings)
    except _REFUSALS as error:
        return str(error) or type(error).__name__
    return ""


def _refused_settings(standard: Mapping[str, Any], family: Mapping[str, Any]) -> list[str]:
    """Settings of a family that megatron-core refuses.

    These are settings without which it accepts the rest of the family. If there is no such setting
    and it accepts the standard settings, they are all settings of the family. Empty: the family is
    not the cause.
    """
    refused = []
    # Each setting is left out once, to find those that cause the refusal.
    for name in family:
        remaining = {key: value for key, value in family.items() if key != name}
        if not _refusal({**standard, **remaining}):
            refused.append(name)
    if not refused and not _refusal(standard):
        return list(family)
    return refused


def _standard_settings(
    spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig
) -> dict[str, Any]:
    """Settings of megatron-core's transformer configuration that a family may override."""
    dtype = DTYPES[model.dtype]
    return {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.groups,
        "kv_channels": spec.head_dim,
        # All families: RMS norms, a gated SiLU, no biases and no dropout.
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": spec.init_std,
        # Stages exchange hidden states in the type of the parameters.
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        # None divides the layers equally.
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers or None,
        "context_parallel_size": parallel.context,
        # megatron-core refuses sequence parallelism with one tensor-parallel rank.
        "sequence_parallel": parallel.sequence_parallel and parallel.tensor > 1,
        # Losses are sums; the trainer divides once by the step's weight.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": model.device == "cpu",
        "attention_softmax_in_fp32": True,
        **_FUSION_OFF,
    }
