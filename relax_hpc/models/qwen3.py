"""From a Qwen3 config.json to megatron-core's transformer configuration and model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_hpc.config.schema import ModelConfig, ParallelConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.families import rope_theta
from relax_hpc.models.hf_mapping import Qwen3Shape
from relax_hpc.models.layer_spec import layer_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_split(shape: Qwen3Shape, parallel: ParallelConfig) -> None:
    """ConfigError if the model cannot be cut as `parallel` says."""
    for what, count in (("key-value heads", shape.groups), ("intermediate_size", shape.inner)):
        if count % parallel.tensor:
            raise ConfigError(f"parallel.tensor: found {parallel.tensor}, allowed divisors of the {count} {what}")
    if shape.layers % parallel.pipeline:
        raise ConfigError(
            f"parallel.pipeline: found {parallel.pipeline}, allowed divisors of the {shape.layers} layers"
        )


def transformer_config(hf_config: dict[str, Any], model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """megatron-core's description of the model, split as `parallel` says, in the run's parameter type."""
    shape, dtype = Qwen3Shape.of(hf_config), DTYPES[model.dtype]
    return TransformerConfig(
        **_mixture(hf_config, shape) if shape.experts else _dense(parallel),
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.expert_inner or shape.inner,
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


def _dense(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        # Micro-batches differ in length, and a stage learns the shape from the one before it.
        "variable_seq_lengths": parallel.pipeline > 1,
        # megatron-core asks this of dense models too when lengths vary.
        "moe_token_dispatcher_type": "alltoall",
    }


def _mixture(hf_config: dict[str, Any], shape: Qwen3Shape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.expert_inner,
        "moe_router_topk": hf_config["num_experts_per_tok"],
        # Without it the softmax is over the chosen experts, which is the same as normalising their probabilities.
        "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
        "moe_router_load_balancing_type": "none",
        # The other dispatchers need CUDA's events.
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
    }


def build(hf_config: dict[str, Any], config: TransformerConfig, device: str, first: bool, last: bool) -> GPTModel:
    """A pipeline stage with random weights, holding the embedding if `first` and the output layer if `last`."""
    shape = Qwen3Shape.of(hf_config)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, device),
        vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=hf_config.get("max_position_embeddings", 0),
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=rope_theta(hf_config),
    ).to(device)
