"""Settings of megatron-core that `actor.megatron` may have: all that megatron-core declares, except
those that other settings or the trainer decide.

They are read from megatron-core's source, because an import takes seconds and needs torch, which a
login node may lack.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from relax_hpc.config.layer_validation import near
from relax_hpc.config.schema import TrainerConfig

Owner = Literal["transformer", "gradients"]
"""TransformerConfig, which describes the model, or DistributedDataParallelConfig, which describes
the reduction of gradients."""

_DECLARED: dict[tuple[str, str], Owner] = {
    ("model_parallel_config.py", "ModelParallelConfig"): "transformer",
    ("transformer/transformer_config.py", "TransformerConfig"): "transformer",
    (
        "distributed/distributed_data_parallel_config.py",
        "DistributedDataParallelConfig",
    ): "gradients",
}
# Reason why users cannot set some settings -> those settings.
_DECIDED = {
    "config.json of the model decides it": """
        activation_func activation_func_clamp_value add_bias_linear add_qkv_bias
        apply_query_key_layer_scaling apply_residual_connection_post_layernorm attention_dropout
        attention_output_gate embedding_init_method embedding_init_method_std
        experimental_attention_variant ffn_hidden_size gated_linear_unit glu_linear_offset
        heterogeneous_block_specs hidden_dropout hidden_size init_method init_method_std
        is_hybrid_model kv_channels layernorm_epsilon layernorm_zero_centered_gamma
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim moe_apply_probs_on_input
        moe_expert_capacity_factor moe_ffn_hidden_size moe_input_jitter_eps moe_latent_size
        moe_layer_freq moe_pad_expert_input_to_capacity moe_router_bias_update_rate
        moe_router_enable_expert_bias moe_router_force_load_balancing moe_router_group_topk
        moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk
        moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_shared_expert_gate
        moe_shared_expert_intermediate_size moe_token_drop_policy moe_token_dropping
        moe_z_loss_coeff mrope_section mtp_loss_scaling_factor mtp_num_layers mtp_standalone
        multi_latent_attention no_rope_freq normalization num_attention_heads num_layers
        num_moe_experts num_query_groups output_layer_init_method qk_clip qk_clip_alpha
        qk_clip_threshold qk_l2_norm qk_layernorm rotary_interleaved softmax_scale softmax_type
        use_fused_weighted_squared_relu window_attn_skip_freq window_size""",
    "set actor.parallel instead": """
        context_parallel_size cp_comm_type expert_model_parallel_size expert_tensor_parallel_size
        hierarchical_context_parallel_sizes hybrid_context_parallel moe_extended_tp
        pipeline_model_parallel_size sequence_parallel tensor_model_parallel_size""",
    "set model.dtype instead": """
        autocast_dtype bf16 enable_autocast fp16 params_dtype pipeline_dtype""",
    "set model.device instead": """
        init_model_with_meta_device perform_initialization use_cpu_initialization""",
    "set model.routing_replay instead": "moe_enable_routing_replay",
    "set actor.kernels instead": """
        apply_rope_fusion bias_activation_fusion fused_single_qkv_rope gradient_accumulation_fusion
        use_te_activation_func""",
    "set actor.experts instead": "moe_grouped_gemm moe_use_legacy_grouped_gemm",
    "set algorithm.balance_coefficient instead": """
        moe_aux_loss_coeff moe_router_load_balancing_type""",
    "routers compute in float32": "moe_router_dtype",
    "ranks that share experts may have unequal numbers of tokens": "moe_token_dispatcher_type",
    "set actor.recompute instead": "moe_layer_recompute recompute_granularity",
    "set actor.optimizer.distributed instead": "use_distributed_optimizer",
    "the trainer decides it, because it sums gradients and divides once": """
        average_in_collective calculate_per_token_loss finalize_model_grads_func grad_reduce_in_fp32
        grad_scale_func grad_sync_func no_sync_func param_sync_func timers variable_seq_lengths""",
    "set actor.optimizer.overlap_gradients instead": "overlap_grad_reduce",
    "a version is published right after its step, which needs all parameters": """
        align_param_gather overlap_param_gather""",
    "packs differ in length, and a graph has one shape": """
        cuda_graph_impl cuda_graph_retain_backward_graph cuda_graph_scope
        cuda_graph_use_single_mempool cuda_graph_warmup_steps enable_cuda_graph
        external_cuda_graph""",
    "set actor.parallel.first_stage_layers or last_stage_layers instead": """
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage""",
    "each stage has its layers in one chunk": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        microbatch_group_size_per_vp_stage overlap_moe_expert_parallel_comm
        pipeline_model_parallel_layout virtual_pipeline_model_parallel_size""",
    "the trainer's model, optimizer and checkpoints do not support it": """
        cpu_offloading data_parallel_sharding_strategy delay_wgrad_compute
        defer_embedding_wgrad_compute fp4 fp4_param fp8 fp8_param fp8_param_gather
        num_distributed_optimizer_instances outer_dp_sharding_strategy
        reuse_grad_buf_for_mxfp8_param_ag use_custom_fsdp use_megatron_fsdp""",
}
DECIDED: dict[str, str] = {}
"""Settings that users cannot set -> the reason."""
for _reason, _names in _DECIDED.items():
    DECIDED |= dict.fromkeys(_names.split(), _reason)
_PLAIN = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "List": list,
    "Tuple": list,
}


@functools.cache
def declared_settings() -> Mapping[str, tuple[Owner, ast.expr]]:
    """Owner and annotation of every setting that megatron-core declares, by name.

    Empty if megatron-core is not installed.
    """
    spec = find_spec("megatron")
    locations = (spec.submodule_search_locations if spec else None) or ()
    settings: dict[str, tuple[Owner, ast.expr]] = {}
    for location in locations:
        for (file, class_name), owner in _DECLARED.items():
            path = Path(location) / "core" / file
            if not path.is_file():
                return {}
            for line in _class_body(path, class_name):
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    settings[line.target.id] = owner, line.annotation
    return settings


def _class_body(path: Path, name: str) -> list[ast.stmt]:
    """Statements in the body of the class ``name`` of a source file."""
    body: list[ast.stmt] = []
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            body += node.body
    return body


def setting_errors(
    settings: TrainerConfig, is_here: bool = True, section: str = "actor"
) -> Iterator[str]:
    """Errors in `megatron` of a trainer's ``section``, one line each.

    ``is_here``: whether the run will use this environment's megatron-core. If not, only the
    settings of `DECIDED` are checked.
    """
    declared = declared_settings() if is_here else {}
    for name, value in settings.megatron.items():
        key = f"{section}.megatron.{name}"
        if name in DECIDED:
            yield f"{key}: found {value!r}, not allowed: {DECIDED[name]}"
        elif declared and (name not in declared or name.startswith("_")):
            allowed = sorted({*declared}.difference(DECIDED))
            yield (
                f"{key}: neither TransformerConfig nor DistributedDataParallelConfig has "
                f"it{near(name, allowed)}"
            )
        elif declared and not _fits(declared[name][1], value):
            yield f"{key}: found {value!r}, allowed: {ast.unparse(declared[name][1])}"
    recompute = [name for name in settings.megatron if name.startswith("recompute_")]
    if recompute and settings.recompute == "none":
        key = f"{section}.megatron.{recompute[0]}"
        yield f"{key}: found a value with {section}.recompute none; set that to full or selective"


def owner_settings(settings: TrainerConfig, owner: Owner) -> dict[str, Any]:
    """Settings of `settings.megatron` that belong to ``owner``."""
    declared = declared_settings()
    return {
        name: value
        for name, value in settings.megatron.items()
        if name in declared and declared[name][0] == owner
    }


def _fits(annotation: ast.expr, value: Any) -> bool:
    """Whether a plain ``value`` fits an annotation. Types that YAML cannot express never fit.

    >>> types = ("Optional[int]", "bool", "float", "Callable")
    >>> [_fits(ast.parse(text, mode="eval").body, 2) for text in types]
    [True, False, True, False]
    """
    match annotation:
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return value is None or _fits(inner, value)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=inner)):
            return any(_fits(option, value) for option in inner)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            allowed = ast.literal_eval(inner)
            return value in (allowed if isinstance(allowed, tuple) else (allowed,))
        case ast.Subscript(value=inner):
            return _fits(inner, value)
        case ast.Name(id=name) if name in _PLAIN:
            return type(value) is _PLAIN[name] or (name == "float" and type(value) is int)
    return False
