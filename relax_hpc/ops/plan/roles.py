"""Footprint of each role that has a model, by the formulas of docs/reference/memory.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from relax_hpc.base.server_devices import devices_per_server, first_device
from relax_hpc.config.schema import (
    ActorConfig,
    Config,
    ForwardConfig,
    ParallelConfig,
    TrainerConfig,
)
from relax_hpc.ops.plan import tower_memory
from relax_hpc.ops.plan.footprint import GIB, Footprint
from relax_hpc.ops.plan.model_memory import (
    ITEM_BYTES,
    MAIN_BYTES,
    expert_parameters,
    kept_elements,
    logits_bytes,
    own_share,
    parameters,
    scored_elements,
    working_elements,
)
from relax_hpc.ops.plan.optimizer_memory import gather_bytes, optimizer_bytes
from relax_hpc.ops.plan.tower_memory import frozen_parameters
from relax_hpc.training.models.expert_grouping import groups_experts
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stages import stage_layers

CONTEXT_BYTES = 1.5 * GIB
"""Bytes of a process on a GPU without tensors: CUDA context, kernels, workspaces, NCCL.
An assumption."""
PROCESS_BYTES = 2 * GIB
"""Bytes of host memory of a process with torch and CUDA, without tensors. An assumption."""
STANDBY_BYTES = 1 * GIB
"""Bytes of host memory of a process that is started ahead: libraries, but no CUDA context.
An assumption."""
ENGINE_SHARE = 0.85
"""Approximate share of a GPU that SGLang uses for weights, keys and values by default."""


def longest_row(config: Config) -> int:
    """Tokens of the longest prompt and response, or of all compared sequences of a file's row.

    A micro-batch holds such a row even if `max_tokens_per_micro_batch` is smaller.
    """
    if config.algorithm.from_file:
        return config.data.max_row_tokens * config.algorithm.sequences
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def _micro_batch_tokens(config: Config, settings: TrainerConfig | ForwardConfig) -> int:
    """Tokens of the largest micro-batch on a rank."""
    row_tokens = -(-longest_row(config) // settings.parallel.context)
    return max(settings.max_tokens_per_micro_batch, row_tokens)


def actor_footprint(config: Config, spec: ModelSpec, group: str, per_node: int) -> Footprint:
    """Footprint of the actor's largest pipeline stage; ``per_node``: its ranks on a node."""
    stages = [
        _actor_stage(config, spec, group, per_node, stage)
        for stage in range(config.actor.parallel.pipeline)
    ]
    return max(stages, key=lambda stage: stage.peak)


def _actor_stage(
    config: Config, spec: ModelSpec, group: str, per_node: int, stage: int
) -> Footprint:
    settings, parallel, item = config.actor, config.actor.parallel, ITEM_BYTES[config.model.dtype]
    is_distributed = settings.optimizer.distributed
    count, share = parameters(spec, parallel, stage), own_share(spec, parallel, stage)
    frozen = frozen_parameters(spec, config, stage)
    trained, trained_share = count - frozen, share - frozen / (parallel.data * parallel.context)
    updated = trained_share if is_distributed else trained
    optimizer = optimizer_bytes(settings, updated, item)
    tokens = _micro_batch_tokens(config, settings)
    phases = _passes(config, spec, tokens, stage)
    phases["update"] = {"optimizer step": optimizer.update}
    gathered_host = 0.0
    if is_distributed:
        gathered_device, gathered_host = gather_bytes(trained, updated)
        phases["checkpoint"] = {"gathered states": gathered_device}
    weights, slabs = count * item, config.weights.slabs or config.max_staleness + 2
    if config.weights.anchor_every:
        slabs += 1
    saved_states = _checkpoint_state_bytes(settings, trained_share, item)
    pinned = {
        "slabs": slabs * share * item,
        "checkpoint": share * item + saved_states,
        "optimizer states": optimizer.pinned,
        "weights of forward roles": _inner_copies(config) * weights,
        "moved out for engines": weights + optimizer.device if config.colocate else 0.0,
    }
    host = {
        "processes": PROCESS_BYTES,
        "started ahead": _standby_bytes(config),
        "states gathered for a checkpoint": gathered_host,
    }
    layout = _describe_layout(parallel)
    return Footprint(
        role="actor",
        group=group,
        split=f"{layout}; {tokens:,} tokens per micro-batch, recompute: {settings.recompute}",
        gpus=parallel.ranks,
        resident={
            "weights": weights,
            "gradients": MAIN_BYTES * trained,
            "optimizer states": optimizer.device,
            "CUDA, NCCL": CONTEXT_BYTES,
        },
        phases=phases,
        pinned=_for_ranks(pinned, per_node),
        host=_for_ranks(host, per_node),
    )


def _passes(
    config: Config, spec: ModelSpec, tokens: int, stage: int
) -> dict[str, dict[str, float]]:
    """Phases of the forward and backward passes of a pipeline stage.

    ``tokens``: tokens of a micro-batch. Returns bytes by phase and purpose.
    """
    settings, parallel, item = config.actor, config.actor.parallel, ITEM_BYTES[config.model.dtype]
    recompute, kernels = settings.recompute, settings.kernels
    is_last = stage == parallel.pipeline - 1
    layers = len(stage_layers(spec.layers, parallel)[stage])
    # Schedule 1F1B: when the first backward pass begins, a stage holds the activations of one
    # micro-batch for itself and one for each stage after it.
    in_flight = parallel.pipeline - stage
    per_layer = kept_elements(spec, parallel, recompute, kernels) * tokens * item
    kept: float = per_layer * layers * in_flight
    if is_last:
        # The output of the final norm, a contiguous copy and its gradient.
        kept += 3 * spec.hidden * tokens * item
    working = working_elements(spec, parallel, recompute, kernels) * tokens * item
    phases: dict[str, dict[str, float]] = {
        "backward": {"activations": kept, "a layer's backward": working}
    }
    towers, tower_working = _tower_passes(config, spec, tokens, stage, in_flight)
    phases["backward"] |= towers
    if groups_experts(settings.experts, spec, config.model, parallel):
        # Joined weights exist for all layers until their backward pass. With recomputation they
        # exist for the current layer only, with their gradients.
        copies = layers if recompute == "none" else 2
        layer_bytes = expert_parameters(spec, parallel, stage) / layers * item
        phases["backward"]["experts in one piece"] = copies * layer_bytes
    if is_last:
        logits = logits_bytes(spec, parallel, tokens, item, kernels, config.algorithm.needs_entropy)
        phases["output layer"] = {"activations": kept, "logits": logits, **towers}
    if towers:
        phases["towers"] = {**towers, "a layer of a tower": tower_working}
    return phases


def _tower_passes(
    config: Config, spec: ModelSpec, tokens: int, stage: int, in_flight: int
) -> tuple[dict[str, float], float]:
    """Activations that towers keep, and bytes of one layer of a tower; only in the first stage."""
    if not spec.towers or stage != 0:
        return {}, 0.0
    item = ITEM_BYTES[config.model.dtype]
    media = tower_memory.media_tokens(config, config.actor, tokens) * item
    if not media:
        return {}, 0.0
    kept = tower_memory.kept_elements(spec, config) * in_flight * media
    return {"towers' activations": kept}, tower_memory.working_elements(spec, config) * media


def _checkpoint_state_bytes(actor: ActorConfig, count: float, item: int) -> float:
    """Bytes of the optimizer's states in a checkpoint.

    A distributed optimizer saves main parameters and both moments in float32.
    """
    if actor.optimizer.distributed:
        return 3 * MAIN_BYTES * count
    return optimizer_bytes(actor, count, item).states


def _standby_bytes(config: Config) -> float:
    """Host memory of the process that is started ahead to replace a rank."""
    return STANDBY_BYTES if config.liveness.start_ahead_s else 0.0


def _for_ranks(sizes: Mapping[str, float], per_node: int) -> dict[str, float]:
    """Bytes of all ranks of a node, from those of one rank; empty purposes are dropped."""
    return {name: size * per_node for name, size in sizes.items() if size}


def critic_footprint(config: Config, spec: ModelSpec, group: str, per_node: int) -> Footprint:
    """Footprint of a critic: that of an actor without slabs.

    It includes the logits of an actor, so it is somewhat too large.
    """
    settings = ActorConfig(
        **{field.name: getattr(config.critic, field.name) for field in fields(config.critic)}
    )
    footprint = actor_footprint(replace(config, actor=settings), spec, group, per_node)
    pinned = {name: size for name, size in footprint.pinned.items() if name != "slabs"}
    return replace(footprint, role="critic", pinned=pinned)


def _inner_copies(config: Config) -> int:
    """Copies of the weights that forward roles inside of the actor keep (`roles.inner_forward`)."""
    roles, algorithm = config.actor.forward, config.algorithm
    keeps_old = "actor_fwd" in roles and algorithm.uses_old and algorithm.mini_batches > 1
    return ("reference" in roles) + keeps_old


def forward_footprint(
    config: Config, spec: ModelSpec, role: str, group: str, per_node: int
) -> Footprint:
    """Footprint of a role that only computes forward passes: its largest pipeline stage."""
    settings = getattr(config, role)
    tokens = _micro_batch_tokens(config, settings)
    host = {"processes": PROCESS_BYTES, "started ahead": _standby_bytes(config)}
    item = ITEM_BYTES[config.model.dtype]
    layout = _describe_layout(settings.parallel)
    stages = [
        Footprint(
            role=role,
            group=group,
            split=f"{layout}; {tokens:,} tokens per micro-batch",
            gpus=settings.parallel.ranks,
            resident={
                "weights": parameters(spec, settings.parallel, stage) * item,
                "CUDA, NCCL": CONTEXT_BYTES,
            },
            phases={"forward": _forward_pass(config, spec, settings, tokens, stage)},
            host=_for_ranks(host, per_node),
        )
        for stage in range(settings.parallel.pipeline)
    ]
    return max(stages, key=lambda stage: stage.peak)


def _forward_pass(
    config: Config, spec: ModelSpec, settings: ForwardConfig, tokens: int, stage: int
) -> dict[str, float]:
    """Bytes of a forward pass of a pipeline stage that keeps nothing, by purpose."""
    parallel, item, kernels = (
        settings.parallel,
        ITEM_BYTES[config.model.dtype],
        config.actor.kernels,
    )
    activations: float = scored_elements(spec, parallel, kernels) * tokens * item
    if stage == 0:
        media = tower_memory.media_tokens(config, settings, tokens) * item
        activations = max(activations, tower_memory.scored_elements(spec) * media)
    sizes = {"activations": activations}
    if config.actor.experts != "sequential" and groups_experts(
        "auto", spec, config.model, parallel
    ):
        layers = len(stage_layers(spec.layers, parallel)[stage])
        sizes["experts in one piece"] = expert_parameters(spec, parallel, stage) / layers * item
    if stage == parallel.pipeline - 1:
        sizes["logits"] = logits_bytes(spec, parallel, tokens, item, kernels, entropy=False)
    return sizes


def engine_footprint(
    config: Config, spec: ModelSpec, group: str, per_node: int, gpu_bytes: float
) -> Footprint:
    """Footprint of SGLang: it reserves a share of the GPU for weights and for the KV cache.

    ``per_node``: engines on a node.
    """
    engine, row_tokens = config.rollout.engine, longest_row(config)
    flags, item = engine.flags, ITEM_BYTES[engine.dtype or config.model.dtype]
    tensor, pipeline = _size_flag(flags, "tp_size"), _size_flag(flags, "pp_size")
    devices = devices_per_server(flags)
    share = engine_flag(flags, "mem_fraction_static")
    model_bytes = parameters(spec, ParallelConfig(), 0) * item
    weights = parameters(spec, ParallelConfig(tensor=tensor), 0) * item / pipeline
    # If there are more ranks than key-value heads, several ranks hold the same head.
    heads = max(1, spec.groups // tensor)
    token_bytes = 2 * heads * spec.head_dim * spec.layers / pipeline * item
    cache_bytes = max(0.0, (share or ENGINE_SHARE) * gpu_bytes - weights)
    limit = engine_flag(flags, "max_total_tokens")
    if limit:
        cache_bytes = min(cache_bytes, limit * token_bytes)
    cache_tokens = int(cache_bytes // token_bytes)
    note = (
        f"keys and values of {cache_tokens:,} tokens, {cache_tokens // row_tokens:,} rows of "
        f"{row_tokens:,}"
    )
    if not share:
        note += f" (mem_fraction_static is not set, assumed: {ENGINE_SHARE})"
    lack = _split_error(config, spec, group)
    if not lack and cache_tokens < row_tokens:
        lack = (
            f"keys and values of one row of {row_tokens:,} tokens need "
            f"{token_bytes * row_tokens / GIB:.1f} GiB, and {cache_bytes / GIB:.1f} are free"
        )
    return Footprint(
        role="rollout",
        group=group,
        split=f"{config.rollout.replicas} engines, {_describe_sizes(flags)}",
        gpus=config.rollout.replicas * devices,
        resident={
            "weights": weights,
            "keys and values": cache_bytes,
            "CUDA, NCCL, graphs": CONTEXT_BYTES,
        },
        pinned={"weights of a version": model_bytes},
        host={"processes": per_node * (1 + devices) * PROCESS_BYTES},
        note=note,
        lack=lack,
    )


def genrm_footprint(
    config: Config, model_bytes: float, group: str, per_node: int, gpu_bytes: float
) -> Footprint:
    """Footprint of the servers of a generative reward model, as that of engines.

    ``model_bytes``: bytes of all weights. ``per_node``: servers on a node.
    """
    settings = config.genrm
    flags = settings.flags
    tensor, pipeline = _size_flag(flags, "tp_size"), _size_flag(flags, "pp_size")
    share = engine_flag(flags, "mem_fraction_static") or ENGINE_SHARE
    devices = devices_per_server(flags)
    weights = model_bytes / (tensor * pipeline)
    cache_bytes = share * gpu_bytes - weights
    lack = _gpu_shortage(config, group, "genrm.replicas", settings.replicas, flags)
    if not lack and cache_bytes <= 0:
        lack = (
            f"weights of {weights / GIB:.1f} GiB per GPU leave no memory for keys and values; "
            "raise genrm.flags.tp_size"
        )
    return Footprint(
        role="genrm",
        group=group,
        split=f"{settings.replicas} servers, {_describe_sizes(flags)}",
        gpus=settings.replicas * devices,
        resident={
            "weights": weights,
            "keys and values": max(0.0, cache_bytes),
            "CUDA, NCCL, graphs": CONTEXT_BYTES,
        },
        host={"processes": per_node * (1 + devices) * PROCESS_BYTES},
        lack=lack,
    )


def _split_error(config: Config, spec: ModelSpec, group: str) -> str:
    """Reason why the engines cannot be split, or have too few GPUs, or an empty text."""
    flags = config.rollout.engine.flags
    tensor = _size_flag(flags, "tp_size")
    if spec.heads % tensor:
        return (
            f"rollout.engine.flags.tp_size: found {tensor}, allowed: divisors of the "
            f"{spec.heads} attention heads"
        )
    return _gpu_shortage(config, group, "rollout.replicas", config.rollout.replicas, flags)


def _gpu_shortage(
    config: Config, group: str, key: str, replicas: int, flags: Mapping[str, Any]
) -> str:
    """Reason why ``group`` has too few GPUs for its engines, or an empty text.

    ``key``: the setting of ``replicas``; ``flags``: SGLang's flags of each engine.
    """
    resources = config.groups[group].resources
    gpus = resources.nodes * resources.gpus_per_node
    skipped = resources.nodes * first_device(flags, 0)
    needed = replicas * devices_per_server(flags)
    if not gpus or needed + skipped <= gpus:
        return ""
    sizes = [f"tp_size {_size_flag(flags, 'tp_size')}"]
    for name in ("pp_size", "dp_size"):
        if engine_flag(flags, name) > 1:
            sizes.append(f"{name} {flags[name]}")
    skipped_note = f" without the {skipped} before base_gpu_id" if skipped else ""
    return (
        f"{replicas} engines of {' and '.join(sizes)} need {needed} GPUs, and group {group} has "
        f"{gpus - skipped}{skipped_note}; lower {key}, or use more nodes"
    )


def _describe_sizes(flags: Mapping[str, Any]) -> str:
    """Description of how ``flags`` split a model over GPUs."""
    text = f"tensor {_size_flag(flags, 'tp_size')}, pipeline {_size_flag(flags, 'pp_size')}"
    data = _size_flag(flags, "dp_size")
    return f"{text}, data {data}" if data > 1 else text


def engine_flag(flags: Mapping[str, Any], name: str) -> float:
    """Value of an SGLang flag; 0 if it is not set, or not a number that SGLang accepts."""
    value = flags.get(name)
    # In Python a bool is an int, but SGLang does not accept it as a number.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    minimum = 1 if name.endswith("_size") else 0
    return value if value >= minimum else 0


def _size_flag(flags: Mapping[str, Any], name: str) -> int:
    """Value of a flag such as `tp_size`; 1 if it is not set."""
    return int(engine_flag(flags, name) or 1)


def _describe_layout(parallel: ParallelConfig) -> str:
    """Description of how ranks split a model."""
    sequence = ", sequence parallel" if parallel.sequence_parallel and parallel.tensor > 1 else ""
    uneven_layers = {"first": parallel.first_stage_layers, "last": parallel.last_stage_layers}
    uneven = ", ".join(f"{name} {count} layers" for name, count in uneven_layers.items() if count)
    pipeline = f"{parallel.pipeline} ({uneven})" if uneven else f"{parallel.pipeline}"
    text = f"tensor {parallel.tensor}, pipeline {pipeline}, data {parallel.data}{sequence}"
    for name, size in {"context": parallel.context, "expert": parallel.expert}.items():
        if size > 1:
            text += f", {name} {size}"
    return text
