"""Names of settings in TRL, verl, OpenRLHF and slime, and the present name of each.

Errors about an unknown option or key look it up in this table and name our setting. The page
docs/coming-from.md shows the same table. Names are from TRL 1.10 (with transformers'
TrainingArguments), verl 0.8, OpenRLHF 0.8 to 0.11, and slime 624b824 (with Megatron's options).
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NEAR = 0.85
"""Similarity from which a word counts as a misspelled name of the table."""
TRAINERS = ("TRL", "verl", "OpenRLHF", "slime")


@dataclass(frozen=True, slots=True)
class OtherName:
    """A setting of this project, or a feature that it lacks, with its names in other trainers."""

    ours: str
    """Dotted key, also `--resume`. If it is empty, there is no such setting, and ``note`` says what
    to do."""
    names: tuple[str, str, str, str]
    """Names in TRL, verl, OpenRLHF and slime, separated by blanks; empty: none. The end of a dotted
    name is enough, such as `optim.lr`."""
    note: str = ""
    """Remark in messages and in the table."""


_MICRO_BATCH = (
    "in tokens: rows are packed, and gradients are accumulated over the micro-batches of a step"
)
_STEPS = "counted in steps; an epoch has rows / prompts_per_step steps"
_NO_LORA = "LoRA is not supported; all weights are trained"
_NO_WANDB = (
    "metrics are in TensorBoard and metrics.jsonl; "
    "metrics.trackers names your own class for other services"
)
TABLE = (
    # Model and data
    OtherName(
        "model.path",
        ("model_name_or_path", "model.path", "pretrain", "hf_checkpoint"),
        "a local directory",
    ),
    OtherName(
        "model.dtype", ("bf16 fp16 torch_dtype model_init_kwargs", "model_dtype", "bf16", "")
    ),
    OtherName("model.reference_path", ("ref_model", "ref.model.path", "", "ref_load")),
    OtherName(
        "data.train",
        ("dataset_name train_dataset", "data.train_files", "prompt_data dataset", "prompt_data"),
    ),
    OtherName("data.eval", ("eval_dataset", "data.val_files", "eval_dataset", "eval_prompt_data")),
    OtherName(
        "data.columns",
        (
            "dataset_text_field",
            "data.prompt_key",
            "input_key label_key",
            "input_key label_key metadata_key tool_key",
        ),
    ),
    OtherName(
        "data.chat_template",
        (
            "chat_template_path",
            "custom_chat_template",
            "apply_chat_template input_template",
            "apply_chat_template",
        ),
    ),
    OtherName(
        "data.max_prompt_tokens",
        ("max_prompt_length", "data.max_prompt_length", "prompt_max_len", "rollout_max_prompt_len"),
    ),
    OtherName(
        "data.max_row_tokens",
        ("max_length max_seq_length", "data.max_length", "max_len", ""),
        "sft and dpo",
    ),
    OtherName("data.shuffle", ("shuffle_dataset", "data.shuffle", "", "rollout_shuffle")),
    # Sizes of a step
    OtherName(
        "prompts_per_step",
        (
            "generation_batch_size gradient_accumulation_steps",
            "data.train_batch_size",
            "rollout_batch_size rollout.batch_size",
            "rollout_batch_size",
        ),
        "prompts of a step over all GPUs; gradients are accumulated as needed",
    ),
    OtherName(
        "samples_per_prompt",
        ("num_generations", "rollout.n", "n_samples_per_prompt", "n_samples_per_prompt"),
        "responses to a prompt",
    ),
    OtherName(
        "actor.max_tokens_per_micro_batch",
        (
            "per_device_train_batch_size",
            "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
            "use_dynamic_bsz log_prob_micro_batch_size_per_gpu",
            "micro_train_batch_size train.micro_batch_size micro_batch_size packing_samples "
            "train_max_tokens_per_gpu",
            "max_tokens_per_gpu use_dynamic_batch_size micro_batch_size",
        ),
        _MICRO_BATCH,
    ),
    OtherName(
        "actor_fwd.max_tokens_per_micro_batch",
        (
            "",
            "",
            "micro_rollout_batch_size rollout.micro_batch_size",
            "log_probs_max_tokens_per_gpu",
        ),
        _MICRO_BATCH,
    ),
    OtherName(
        "algorithm.mini_batches",
        (
            "",
            "ppo_mini_batch_size",
            "train_batch_size train.batch_size",
            "num_steps_per_rollout global_batch_size",
        ),
        "number of updates of a step, not the number of rows in an update",
    ),
    OtherName("algorithm.passes", ("num_iterations", "ppo_epochs", "max_epochs", "")),
    OtherName(
        "steps",
        (
            "max_steps num_train_epochs",
            "trainer.total_epochs total_training_steps",
            "num_episodes",
            "num_rollout num_epoch",
        ),
        _STEPS,
    ),
    OtherName(
        "max_staleness",
        (
            "steps_per_generation",
            "staleness_threshold",
            "async_train train.async_enable async_queue_size",
            "",
        ),
        "0 is synchronous",
    ),
    # Optimizer
    OtherName(
        "actor.optimizer.lr", ("learning_rate", "optim.lr", "actor_learning_rate adam.lr", "lr")
    ),
    OtherName("critic.optimizer.lr", ("", "critic.optim.lr", "critic_learning_rate", "")),
    OtherName(
        "actor.optimizer.schedule",
        ("lr_scheduler_type", "warmup_style lr_decay_style", "lr_scheduler", "lr_decay_style"),
    ),
    OtherName(
        "actor.optimizer.warmup_steps",
        (
            "warmup_ratio warmup_steps",
            "lr_warmup_steps lr_warmup_steps_ratio",
            "lr_warmup_ratio",
            "lr_warmup_iters",
        ),
        "in steps",
    ),
    OtherName(
        "actor.optimizer.weight_decay", ("weight_decay", "optim.weight_decay", "l2", "weight_decay")
    ),
    OtherName(
        "actor.optimizer.clip_grad",
        ("max_grad_norm", "grad_clip clip_grad", "max_norm", "clip_grad"),
    ),
    OtherName("actor.optimizer.beta1", ("adam_beta1", "", "", "adam_beta1")),
    OtherName("actor.optimizer.beta2", ("adam_beta2", "optim.betas", "adam_betas", "adam_beta2")),
    OtherName("actor.optimizer.eps", ("adam_epsilon", "", "", "adam_eps")),
    OtherName(
        "actor.optimizer.offload",
        ("", "optimizer_offload param_offload", "adam_offload", "optimizer_cpu_offload"),
    ),
    OtherName(
        "actor.optimizer.distributed",
        ("deepspeed fsdp", "fsdp_config actor.strategy", "zero_stage", "use_distributed_optimizer"),
        "the trainer is megatron-core",
    ),
    OtherName(
        "actor.recompute",
        (
            "gradient_checkpointing",
            "enable_gradient_checkpointing",
            "gradient_checkpointing",
            "recompute_granularity",
        ),
    ),
    OtherName(
        "actor.kernels",
        ("use_liger_kernel attn_implementation", "use_liger", "flash_attn attn_implementation", ""),
    ),
    # Algorithm
    OtherName(
        "algorithm.name",
        (
            "importance_sampling_level scale_rewards",
            "adv_estimator",
            "advantage_estimator advantage.estimator",
            "advantage_estimator",
        ),
    ),
    OtherName(
        "algorithm.reduction",
        ("loss_type", "loss_agg_mode", "policy_loss_type", "calculate_per_token_loss"),
    ),
    OtherName(
        "algorithm.kl.coefficient",
        ("beta", "kl_loss_coef use_kl_loss", "use_kl_loss", "kl_loss_coef use_kl_loss"),
        "KL to the reference in the loss; 0 needs no reference. For dpo it is algorithm.beta",
    ),
    OtherName(
        "algorithm.kl_in_reward",
        (
            "kl_coef",
            "kl_ctrl.kl_coef use_kl_in_reward kl_penalty",
            "init_kl_coef kl.init_coef",
            "kl_coef",
        ),
    ),
    OtherName(
        "algorithm.kl.estimator", ("kl_estimator", "kl_loss_type", "kl_estimator", "kl_loss_type")
    ),
    OtherName(
        "algorithm.kl.refresh_every",
        ("ref_model_sync_steps sync_ref_model", "", "", "ref_update_interval"),
    ),
    OtherName(
        "algorithm.clip_low",
        (
            "epsilon cliprange",
            "clip_ratio_low clip_ratio",
            "eps_clip eps_clip_low_high",
            "eps_clip",
        ),
    ),
    OtherName("algorithm.clip_high", ("epsilon_high", "clip_ratio_high", "", "eps_clip_high")),
    OtherName(
        "algorithm.clip_cap",
        ("delta", "clip_ratio_c", "dual_clip", "eps_clip_c"),
        "for algorithm dual_clip",
    ),
    OtherName(
        "algorithm.entropy_coefficient",
        ("entropy_coef", "entropy_coeff", "entropy_loss_coef entropy_coef", "entropy_coef"),
    ),
    OtherName("algorithm.gamma", ("gamma", "algorithm.gamma", "gamma", "gamma")),
    OtherName("algorithm.gae_lambda", ("lam", "algorithm.lam", "lambd", "lambd")),
    OtherName("algorithm.mask_truncated", ("mask_truncated_completions", "", "", "")),
    OtherName(
        "algorithm.overlong.buffer",
        ("", "overlong_buffer.len overlong_buffer", "overlong_buffer_len", ""),
    ),
    # Generation
    OtherName(
        "rollout.max_new_tokens",
        (
            "max_completion_length max_new_tokens response_length",
            "max_response_length response_length",
            "generate_max_len",
            "rollout_max_response_len",
        ),
    ),
    OtherName(
        "rollout.temperature",
        ("temperature", "rollout.temperature", "temperature", "rollout_temperature"),
    ),
    OtherName("rollout.top_p", ("top_p", "rollout.top_p", "top_p", "rollout_top_p")),
    OtherName("rollout.top_k", ("top_k", "rollout.top_k", "top_k", "rollout_top_k")),
    OtherName("rollout.min_p", ("min_p", "", "", "")),
    OtherName(
        "rollout.engine.kind",
        ("use_vllm vllm_mode", "rollout.name rollout.mode", "vllm_sync_backend", ""),
        "sglang",
    ),
    OtherName(
        "rollout.replicas", ("", "agent.num_workers", "vllm_num_engines", "rollout_num_gpus")
    ),
    OtherName(
        "rollout.engine.flags",
        (
            "vllm_gpu_memory_utilization vllm_tensor_parallel_size",
            "gpu_memory_utilization rollout.tensor_model_parallel_size engine_kwargs max_num_seqs",
            "vllm_gpu_memory_utilization vllm_tensor_parallel_size enforce_eager",
            "rollout_num_gpus_per_engine sglang_mem_fraction_static sglang_server_concurrency",
        ),
        "{mem_fraction_static: 0.8, tp_size: 2, ...}, with SGLang's names",
    ),
    OtherName(
        "colocate",
        (
            "",
            "hybrid_engine free_cache_engine",
            "colocate_all_models train.colocate_all",
            "colocate",
        ),
    ),
    OtherName("rollout.stop", ("", "", "", "rollout_stop")),
    OtherName("weights.publish_every", ("", "", "", "update_weights_interval"), "in steps"),
    OtherName(
        "rollout.partial_rollout",
        ("", "", "", "partial_rollout"),
        "by default generation continues during an update of the weights",
    ),
    OtherName(
        "rollout.over_sampling",
        ("", "", "", "over_sampling_batch_size"),
        "a share of the tickets, not a number of prompts",
    ),
    # Rewards
    OtherName(
        "rollout.reward",
        (
            "reward_funcs reward_model",
            "custom_reward_function custom_reward_function.path custom_reward_function.name "
            "reward_manager",
            "reward_pretrain reward.model_name_or_path",
            "rm_type custom_rm_path",
        ),
        "a built-in name, or your own package.module:function",
    ),
    OtherName("reward.weighted", ("reward_weights", "", "", "")),
    OtherName("reward.by_row.column", ("", "reward_fn_key", "", "")),
    OtherName(
        "reward.remote.url", ("", "sandbox_fusion.url", "remote_rm_url reward.remote_url", "rm_url")
    ),
    OtherName(
        "algorithm.whiten", ("whiten_rewards", "", "normalize_reward", "normalize_advantages")
    ),
    OtherName(
        "rollout.filter",
        (
            "",
            "filter_groups filter_groups.enable",
            "dynamic_filtering dynamic_filtering_enable",
            "dynamic_sampling_filter_path",
        ),
        "rewards_differ",
    ),
    OtherName(
        "algorithm.critic_warmup_steps", ("", "", "", "num_critic_only_steps"), "for algorithm ppo"
    ),
    OtherName("algorithm.value_clip", ("", "", "", "value_clip"), "for algorithm ppo"),
    OtherName(
        "algorithm.correction.kind",
        ("", "", "", "use_tis tis_clip tis_clip_low"),
        "on by default; algorithm.correction.high and low are its limits",
    ),
    OtherName(
        "model.routing_replay", ("", "", "", "use_rollout_routing_replay use_routing_replay")
    ),
    OtherName(
        "model.teacher_path", ("", "", "", "opd_teacher_load use_opd"), "for algorithm distill"
    ),
    # The run
    OtherName(
        "name", ("run_name", "experiment_name project_name", "wandb_run_name", "tb_experiment_name")
    ),
    OtherName(
        "run_dir", ("output_dir logging_dir", "default_local_dir", "save_path ckpt_path", "save")
    ),
    OtherName(
        "checkpoint.every", ("save_steps save_strategy", "save_freq", "save_steps", "save_interval")
    ),
    OtherName(
        "checkpoint.keep_last",
        ("save_total_limit", "max_actor_ckpt_to_keep", "max_ckpt_num ckpt.max_num", ""),
    ),
    OtherName(
        "--resume",
        ("resume_from_checkpoint", "resume_mode resume_from_path", "load_checkpoint", "load"),
    ),
    OtherName(
        "eval.every",
        ("eval_steps eval_strategy", "test_freq val_before_train", "eval_steps", "eval_interval"),
    ),
    OtherName(
        "eval.responses",
        ("", "val_kwargs.n", "eval_n_samples_per_prompt", "n_samples_per_eval_prompt"),
    ),
    OtherName(
        "eval.temperature", ("", "val_kwargs.temperature", "eval_temperature", "eval_temperature")
    ),
    OtherName(
        "samples.per_step", ("log_completions", "rollout_data_dir log_val_generations", "", "")
    ),
    OtherName(
        "actor.parallel.tensor",
        (
            "",
            "tensor_model_parallel_size tensor_parallel_size",
            "ds_tensor_parallel_size",
            "tensor_model_parallel_size",
        ),
    ),
    OtherName(
        "actor.parallel.pipeline",
        ("", "pipeline_model_parallel_size", "", "pipeline_model_parallel_size"),
    ),
    OtherName(
        "actor.parallel.expert",
        ("", "expert_model_parallel_size", "", "expert_model_parallel_size"),
    ),
    OtherName(
        "actor.parallel.context",
        ("", "ulysses_sequence_parallel_size", "ring_attn_size", "context_parallel_size"),
    ),
    OtherName(
        "groups",
        (
            "num_processes",
            "n_gpus_per_node nnodes",
            "actor_num_nodes actor_num_gpus_per_node num_gpus_per_node",
            "actor_num_nodes actor_num_gpus_per_node num_gpus_per_node",
        ),
        "groups.actor.resources: {nodes: 2, gpus_per_node: 8}",
    ),
    OtherName("threads", ("", "num_cpus", "", "")),
    OtherName("seed", ("data_seed", "", "", "rollout_seed")),
    # Features that this project lacks
    OtherName(
        "",
        (
            "use_peft peft_config lora_r lora_alpha lora_dropout lora_target_modules load_in_4bit",
            "lora_rank lora_alpha target_modules",
            "lora_rank lora.rank lora_alpha lora_dropout target_modules load_in_4bit",
            "",
        ),
        _NO_LORA,
    ),
    OtherName(
        "",
        (
            "report_to wandb_project wandb_entity",
            "trainer.logger wandb_project",
            "use_wandb wandb_project wandb_group wandb.project",
            "use_wandb wandb_project wandb_group wandb_team",
        ),
        _NO_WANDB,
    ),
    OtherName("", ("logging_steps", "", "logging_steps", ""), "each step is logged"),
    OtherName(
        "",
        ("push_to_hub hub_model_id", "", "", ""),
        "nothing is uploaded; relax-hpc convert exports",
    ),
)


def find_other_name(key: str) -> tuple[OtherName, str, str] | None:
    """Return the setting that another trainer calls ``key``, with that trainer and the name; None
    if the table does not have it. The end of ``key`` is enough.

    >>> find_other_name("actor_rollout_ref.actor.optim.lr")[0].ours
    'actor.optimizer.lr'
    """
    sections = key.lstrip("-+").replace("-", "_").split(".")
    for start in range(len(sections)):
        entry = _by_name().get(".".join(sections[start:]))
        if entry:
            return entry
    return None


def explain_other_name(key: str) -> str:
    """Return the text for an error about the unknown ``key``; empty if the table does not have it.

    >>> explain_other_name("learning_rate")
    "TRL's learning_rate is actor.optimizer.lr here"
    """
    entry = find_other_name(key)
    if entry is None:
        return ""
    setting, trainer, name = entry
    if not setting.ours:
        return f"{trainer}'s {name} does not exist here: {setting.note}"
    note = f" ({setting.note})" if setting.note else ""
    return f"{trainer}'s {name} is {setting.ours} here{note}"


def suggest_other_name(key: str) -> str:
    """Return the text for an error about ``key`` if it is similar to a name in the table; else
    empty.

    >>> suggest_other_name("learnign_rate")
    "did you mean TRL's learning_rate? It is actor.optimizer.lr here"
    """
    written = key.lstrip("-+").replace("-", "_")
    near = difflib.get_close_matches(written, _by_name(), n=1, cutoff=_NEAR)
    if not near:
        return ""
    setting, trainer, name = _by_name()[near[0]]
    meaning = f"It is {setting.ours} here" if setting.ours else setting.note
    return f"did you mean {trainer}'s {name}? {meaning}"


def explain_section(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, text of `explain_other_name`) for ``key``, or for the keys inside its
    ``value``."""
    text = explain_other_name(key)
    if text:
        yield key, text
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from explain_section(f"{key}.{name}", inner)


@functools.cache
def _by_name() -> Mapping[str, tuple[OtherName, str, str]]:
    """Return settings by each of their names. If trainers share a name, the first trainer
    counts."""
    entries: dict[str, tuple[OtherName, str, str]] = {}
    for setting in TABLE:
        for trainer, names in zip(TRAINERS, setting.names, strict=True):
            for name in names.split():
                # A name that equals the end of our name is suggested without this table.
                if name != setting.ours.rpartition(".")[2]:
                    entries.setdefault(name, (setting, trainer, name))
    return entries


def names_of(setting: OtherName) -> Sequence[tuple[str, list[str]]]:
    """Return (trainer, names) of a setting."""
    return [
        (trainer, names.split()) for trainer, names in zip(TRAINERS, setting.names, strict=True)
    ]
