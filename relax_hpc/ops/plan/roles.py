"""The footprint of each role that has a model: the formulas of docs/reference/memory.md, a function
a role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from relax_hpc.base.server_devices import devices_per_server, first_device
from relax_hpc.config.schema import ActorConfig, Config, ParallelConfig
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
from relax_hpc.ops.plan.optimizer_memory import gathered, optimizer_bytes
from relax_hpc.ops.plan.tower_memory import frozen_parameters
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stages import stage_layers

CONTEXT_BYTES = 1.5 * GIB
"""Bytes of a process on a GPU before it has anything: CUDA's context, kernels, workspaces, NCCL. An
assumption."""
PROCESS_BYTES = 2 * GIB
"""Bytes of a process in host memory, with torch and CUDA, before it has anything. An assumption."""
AHEAD_BYTES = 1 * GIB
"""Bytes of host memory of a process that waits to be needed: its libraries, without a CUDA context.
An assumption."""
ENGINE_SHARE = 0.85
"""Share of a GPU that SGLang takes for weights, keys and values where `mem_fraction_static` does
not say; about."""


def longest_row(config: Config) -> int:
    """Tokens of the longest prompt and response, or of all sequences of a file's row that are
    compared; a micro-batch takes them whole, however few it is to have."""
    if config.algorithm.from_file:
        return config.data.max_row_tokens * config.algorithm.sequences
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def actor(config: Config, spec: ModelSpec, group: str, per_node: int) -> Footprint:
    """Footprint of the actor's pipeline stage with the most; ``per_node``: its ranks on a node."""
    stages = [
        _actor_stage(config, spec, group, per_node, stage)
        for stage in range(config.actor.parallel.pipeline)
    ]
    return max(stages, key=lambda stage: stage.peak)


def _actor_stage(
    config: Config, spec: ModelSpec, group: str, per_node: int, stage: int
) -> Footprint:
    settings, parallel, item = config.actor, config.actor.parallel, ITEM_BYTES[config.model.dtype]
    count, share = parameters(spec, parallel, stage), own_share(spec, parallel, stage)
    frozen = frozen_parameters(spec, config, stage)
    trained, own = count - frozen, share - frozen / (parallel.data * parallel.context)
    updated = own if settings.optimizer.distributed else trained
    optimizer = optimizer_bytes(settings, updated, item)
    tokens = max(settings.max_tokens_per_micro_batch, -(-longest_row(config) // parallel.context))
    moments = _passes(config, spec, tokens, stage) | {
        "update": {"optimizer step": optimizer.update}
    }
    on_device, on_host = (
        gathered(trained, updated) if settings.optimizer.distributed else (0.0, 0.0)
    )
    if on_device:
        moments["checkpoint"] = {"gathered states": on_device}
    weights, slabs = count * item, config.weights.slabs or config.max_staleness + 2
    pinned = {
        "slabs": (slabs + (1 if config.weights.anchor_every else 0)) * share * item,
        "checkpoint": share * item + _saved(settings, own, item),
        "optimizer states": optimizer.pinned,
        "weights of forward roles": _inner_copies(config) * weights,
        "what makes way for engines": (weights + optimizer.device) * config.colocate,
    }
    host = {
        "processes": PROCESS_BYTES,
        "started ahead": _ahead(config),
        "states gathered for a checkpoint": on_host,
    }
    return Footprint(
        role="actor",
        group=group,
        split=_split(
            parallel, f"{tokens:,} tokens a micro-batch, recomputed: {settings.recompute}"
        ),
        gpus=parallel.ranks,
        resident={
            "weights": weights,
            "gradients": MAIN_BYTES * trained,
            "optimizer states": optimizer.device,
            "CUDA, NCCL": CONTEXT_BYTES,
        },
        moments=moments,
        pinned=_of_all(pinned, per_node),
        host=_of_all(host, per_node),
    )


def _passes(
    config: Config, spec: ModelSpec, tokens: int, stage: int
) -> dict[str, dict[str, float]]:
    """Moments of forward and backward passes of a pipeline stage, with ``tokens`` a micro-batch."""
    settings, parallel, item = config.actor, config.actor.parallel, ITEM_BYTES[config.model.dtype]
    last, kernels = stage == parallel.pipeline - 1, settings.kernels
    # One forward, one backward: a stage is ahead of the last by as many micro-batches as there are
    # stages after it.
    in_flight, layers = parallel.pipeline - stage, stage_layers(spec.layers, parallel)[stage]
    kept = (
        kept_elements(spec, parallel, settings.recompute, kernels)
        * len(layers)
        * in_flight
        * tokens
        * item
    )
    # Of the last stage: what the final norm gives, in order and with its gradient.
    kept += 3 * spec.hidden * tokens * item if last else 0
    working = working_elements(spec, parallel, settings.recompute, kernels) * tokens * item
    found = {"backward": {"activations": kept, "a layer's backward": working}}
    media = (
        tower_memory.media_tokens(config, settings, tokens) * item
        if spec.towers and stage == 0
        else 0.0
    )
    towers = (
        {"towers' activations": tower_memory.kept_elements(spec, config) * in_flight * media}
        if media
        else {}
    )
    found["backward"] |= towers
    if settings.experts == "grouped":
        # Of every layer until its backward pass, or of the one that is computed again, and their
        # gradients.
        copies = len(layers) if settings.recompute == "none" else 2
        found["backward"]["experts in one piece"] = (
            copies * expert_parameters(spec, parallel, stage) / len(layers) * item
        )
    if last:
        logits = logits_bytes(spec, parallel, tokens, item, kernels, config.algorithm.needs_entropy)
        found["output layer"] = {"activations": kept, "logits": logits, **towers}
    if towers:
        found["towers"] = {
            **towers,
            "a layer of a tower": tower_memory.working_elements(spec, config) * media,
        }
    return found


def _saved(actor: ActorConfig, count: float, item: int) -> float:
    """Bytes of the optimizer's states in a checkpoint; a distributed one has all three in
    float32."""
    return (
        3 * MAIN_BYTES * count
        if actor.optimizer.distributed
        else optimizer_bytes(actor, count, item).states
    )


def _ahead(config: Config) -> float:
    """Bytes of a rank that waits to take the place of one that ends."""
    return AHEAD_BYTES if config.liveness.start_ahead_s else 0.0


def _of_all(sizes: Mapping[str, float], per_node: int) -> dict[str, float]:
    """Bytes by purpose of ``per_node`` ranks from those of one, without purposes that take none."""
    return {name: size * per_node for name, size in sizes.items() if size}


def critic(config: Config, spec: ModelSpec, group: str, per_node: int) -> Footprint:
    """Footprint of a critic: as of an actor that publishes nothing, with its logits, and so
    somewhat too much."""
    settings = ActorConfig(
        **{each.name: getattr(config.critic, each.name) for each in fields(config.critic)}
    )
    found = actor(replace(config, actor=settings), spec, group, per_node)
    pinned = {what: size for what, size in found.pinned.items() if what != "slabs"}
    return replace(found, role="critic", pinned=pinned)


def _inner_copies(config: Config) -> int:
    """Copies of the weights that forward roles in the actor keep; see `roles.inner_forward`."""
    roles, algorithm = config.actor.forward, config.algorithm
    keeps_old = "actor_fwd" in roles and algorithm.uses_old and algorithm.mini_batches > 1
    return ("reference" in roles) + keeps_old


def forward(config: Config, spec: ModelSpec, role: str, group: str, per_node: int) -> Footprint:
    """Footprint of a forward role: of its pipeline stage with the most."""
    settings = getattr(config, role)
    parallel, item = settings.parallel, ITEM_BYTES[config.model.dtype]
    tokens = max(settings.max_tokens_per_micro_batch, -(-longest_row(config) // parallel.context))
    found = []
    for stage in range(parallel.pipeline):
        passing = {
            "activations": scored_elements(spec, parallel, config.actor.kernels) * tokens * item
        }
        if stage == 0:
            media = tower_memory.media_tokens(config, settings, tokens) * item
            passing["activations"] = max(
                passing["activations"], tower_memory.scored_elements(spec) * media
            )
        if stage == parallel.pipeline - 1:
            passing["logits"] = logits_bytes(
                spec, parallel, tokens, item, config.actor.kernels, entropy=False
            )
        weights = parameters(spec, parallel, stage) * item
        found.append(
            Footprint(
                role=role,
                group=group,
                split=_split(parallel, f"{tokens:,} tokens a micro-batch"),
                gpus=parallel.ranks,
                resident={"weights": weights, "CUDA, NCCL": CONTEXT_BYTES},
                moments={"forward": passing},
                host=_of_all(
                    {"processes": PROCESS_BYTES, "started ahead": _ahead(config)}, per_node
                ),
            )
        )
    return max(found, key=lambda stage: stage.peak)


def engine(
    config: Config, spec: ModelSpec, group: str, per_node: int, gpu_bytes: float
) -> Footprint:
    """Footprint of SGLang: the share of the GPU that it takes at once, of which weights leave the
    rest to keys and values.

    ``per_node``: engines on a node.
    """
    engine, longest = config.rollout.engine, longest_row(config)
    flags, item = engine.flags, ITEM_BYTES[engine.dtype or config.model.dtype]
    tensor, pipeline = (int(engine_flag(flags, name) or 1) for name in ("tp_size", "pp_size"))
    devices = devices_per_server(flags)
    share = engine_flag(flags, "mem_fraction_static")
    whole = parameters(spec, ParallelConfig(), 0) * item
    weights = parameters(spec, ParallelConfig(tensor=tensor), 0) * item / pipeline
    # Key-value heads are repeated where there are more ranks than heads.
    token = 2 * max(1, spec.groups // tensor) * spec.head_dim * spec.layers / pipeline * item
    room = max(0.0, (share or ENGINE_SHARE) * gpu_bytes - weights)
    if limit := engine_flag(flags, "max_total_tokens"):
        room = min(room, limit * token)
    kept = int(room // token)
    said = "" if share else f" (mem_fraction_static is not set, taken for {ENGINE_SHARE})"
    need = f"keys and values of one row of {longest:,} tokens need {token * longest / GIB:.1f} GiB"
    return Footprint(
        role="rollout",
        group=group,
        split=f"{config.rollout.replicas} engines, {_sizes(flags)}",
        gpus=config.rollout.replicas * devices,
        resident={"weights": weights, "keys and values": room, "CUDA, NCCL, graphs": CONTEXT_BYTES},
        pinned={"weights of a version": whole},
        host={"processes": per_node * (1 + devices) * PROCESS_BYTES},
        note=f"keys and values of {kept:,} tokens, {kept // longest:,} rows of {longest:,}{said}",
        lack=_misplaced(config, spec, group)
        or ("" if kept >= longest else f"{need}, and {room / GIB:.1f} are left"),
    )


def judge(config: Config, whole: float, group: str, per_node: int, gpu_bytes: float) -> Footprint:
    """Footprint of the servers of a generative reward model, ``per_node`` on a node: the share of
    the GPU that SGLang takes, of which the weights, ``whole`` bytes of all, leave the rest to keys
    and values."""
    settings = config.genrm
    tensor, pipeline = (
        int(engine_flag(settings.flags, name) or 1) for name in ("tp_size", "pp_size")
    )
    share = engine_flag(settings.flags, "mem_fraction_static") or ENGINE_SHARE
    devices = devices_per_server(settings.flags)
    weights = whole / (tensor * pipeline)
    room = share * gpu_bytes - weights
    small = (
        f"weights of {weights / GIB:.1f} GiB a GPU leave nothing to keys and values; a larger "
        "genrm.flags.tp_size"
    )
    return Footprint(
        role="genrm",
        group=group,
        split=f"{settings.replicas} servers, {_sizes(settings.flags)}",
        gpus=settings.replicas * devices,
        resident={
            "weights": weights,
            "keys and values": max(0.0, room),
            "CUDA, NCCL, graphs": CONTEXT_BYTES,
        },
        host={"processes": per_node * (1 + devices) * PROCESS_BYTES},
        lack=_too_many(config, group, "genrm.replicas", settings.replicas, settings.flags)
        or (small if room <= 0 else ""),
    )


def _misplaced(config: Config, spec: ModelSpec, group: str) -> str:
    """Reason why engines cannot be split so, or have too few GPUs. Empty: they can."""
    flags = config.rollout.engine.flags
    tensor = int(engine_flag(flags, "tp_size") or 1)
    if spec.heads % tensor:
        return (
            f"rollout.engine.flags.tp_size: found {tensor}, allowed: divisors of the "
            f"{spec.heads} attention heads"
        )
    return _too_many(config, group, "rollout.replicas", config.rollout.replicas, flags)


def _too_many(config: Config, group: str, key: str, replicas: int, flags: Mapping[str, Any]) -> str:
    """Reason why ``group`` has too few GPUs for ``replicas`` engines with ``flags``. Empty: it has
    enough.

    ``key``: the setting of ``replicas``.
    """
    resources = config.groups[group].resources
    present = resources.nodes * resources.gpus_per_node
    skipped = resources.nodes * first_device(flags, 0)
    taken = replicas * devices_per_server(flags)
    if not present or taken + skipped <= present:
        return ""
    sizes = " and ".join(
        [f"tp_size {int(engine_flag(flags, 'tp_size') or 1)}"]
        + [
            f"{name} {flags[name]}"
            for name in ("pp_size", "dp_size")
            if engine_flag(flags, name) > 1
        ]
    )
    left_out = f" without the {skipped} before base_gpu_id" if skipped else ""
    return (
        f"{replicas} engines of {sizes} take {taken} GPUs, and group {group} has "
        f"{present - skipped}{left_out}; fewer {key}, or more nodes"
    )


def _sizes(flags: Mapping[str, Any]) -> str:
    """Description of how ``flags`` split a model over GPUs."""
    tensor, pipeline, data = (
        int(engine_flag(flags, name) or 1) for name in ("tp_size", "pp_size", "dp_size")
    )
    return f"tensor {tensor}, pipeline {pipeline}" + (f", data {data}" if data > 1 else "")


def engine_flag(flags: Mapping[str, Any], name: str) -> float:
    """Value of an SGLang flag; 0 where it is not set, or is nothing that SGLang would take."""
    found = flags.get(name)
    return (
        found
        if type(found) in (int, float) and found >= (1 if name.endswith("_size") else 0)
        else 0
    )


def _split(parallel: ParallelConfig, more: str) -> str:
    sequence = ", sequence parallel" if parallel.sequence_parallel and parallel.tensor > 1 else ""
    told = {"first": parallel.first_stage_layers, "last": parallel.last_stage_layers}
    uneven = ", ".join(f"{name} {count} layers" for name, count in told.items() if count)
    pipeline = f"{parallel.pipeline}{f' ({uneven})' if uneven else ''}"
    cut = f"tensor {parallel.tensor}, pipeline {pipeline}, data {parallel.data}{sequence}"
    further = {"context": parallel.context, "expert": parallel.expert}
    cut += "".join(f", {name} {size}" for name, size in further.items() if size > 1)
    return f"{cut}; {more}"
