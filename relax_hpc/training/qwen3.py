"""From a Qwen3 config.json to megatron-core's transformer configuration; what is not understood is refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_hpc.config.schema import ModelConfig, ParallelConfig
from relax_hpc.errors import ConfigError
from relax_hpc.training.hf_mapping import Qwen3Shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
)
_ONLY = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def check_supported(hf_config: dict[str, Any]) -> None:
    """ConfigError naming the key of config.json that this trainer does not know how to train."""
    for key in _REQUIRED:
        if key not in hf_config:
            raise ConfigError(f"config.json: {key} is missing; is this a Qwen3 model?")
    for key, allowed in _ONLY.items():
        if hf_config.get(key, allowed) != allowed:
            raise ConfigError(f"config.json: {key} is {hf_config[key]!r}, supported is {allowed!r}")
    kind = _rope(hf_config).get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"config.json: rope_type is {kind!r}, supported is 'default'")


def check_split(shape: Qwen3Shape, parallel: ParallelConfig) -> None:
    """ConfigError if the model cannot be cut as `parallel` says."""
    for what, count in (("key-value heads", shape.groups), ("intermediate_size", shape.inner)):
        if count % parallel.tensor:
            raise ConfigError(f"parallel.tensor: found {parallel.tensor}, allowed divisors of the {count} {what}")
    if shape.layers % parallel.pipeline:
        raise ConfigError(
            f"parallel.pipeline: found {parallel.pipeline}, allowed divisors of the {shape.layers} layers"
        )


def rope_theta(hf_config: dict[str, Any]) -> float:
    """Base of the rotary embedding, wherever this transformers release keeps it."""
    return float(_rope(hf_config).get("rope_theta") or hf_config.get("rope_theta") or 10000.0)


def _rope(hf_config: dict[str, Any]) -> dict[str, Any]:
    return hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}


def transformer_config(hf_config: dict[str, Any], model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """megatron-core's description of the model, split as `parallel` says, in the run's parameter type."""
    shape, dtype = Qwen3Shape.of(hf_config), DTYPES[model.dtype]
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.inner,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=hf_config.get("initializer_range", 0.02),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
        # Micro-batches differ in length, and a stage learns the shape from the one before it.
        variable_seq_lengths=parallel.pipeline > 1,
        # megatron-core asks this of dense models too when lengths vary.
        moe_token_dispatcher_type="alltoall",
        # Losses are sums; the trainer divides once by the step's weight.
        calculate_per_token_loss=True,
        use_cpu_initialization=model.device == "cpu",
        attention_softmax_in_fp32=True,
        # Fused kernels that need Apex or a GPU.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
