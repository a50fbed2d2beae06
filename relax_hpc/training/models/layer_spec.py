"""Modules of transformer layers: plain torch, Triton kernels, or Transformer Engine."""

from __future__ import annotations

import copy

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_hpc.config.schema import Kernels
from relax_hpc.training.models.attention import CausalAttention
from relax_hpc.training.models.expert_layer import put_experts
from relax_hpc.training.models.norm import RMSNorm


def layer_spec(config: TransformerConfig, kernels: Kernels) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage and the final norm. Attention and the grouping of experts are
    the same for all ``kernels``."""
    grouped = config.moe_grouped_gemm
    if kernels == "te":
        sequential = copy.copy(config)
        sequential.moe_grouped_gemm = False
        block = get_gpt_decoder_block_spec(sequential, use_transformer_engine=True)
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
            if config.num_moe_experts:
                put_experts(layer, grouped)
        return block
    norm = _norm(kernels)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    if config.num_moe_experts:
        # By default the local spec maps the norm before experts to a name of Transformer Engine in
        # checkpoints. Here it keeps its own name.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
        put_experts(layer, grouped)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = norm
        attention.k_layernorm = norm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm
    )


def _norm(kernels: Kernels) -> type[RMSNorm]:
    if kernels == "plain":
        return RMSNorm
    from relax_hpc.training.models.triton_layers import FusedRMSNorm

    return FusedRMSNorm
