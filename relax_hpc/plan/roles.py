"""The footprint of each role that has a model: the formulas of docs/reference/memory.md, a function a role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_hpc.config.schema import Config, ParallelConfig
from relax_hpc.models.spec import ModelSpec
from relax_hpc.plan.footprint import GIB, Footprint
from relax_hpc.plan.model_memory import (
    ITEM_BYTES,
    MAIN_BYTES,
    kept_elements,
    logits_bytes,
    parameters,
    scored_elements,
    working_elements,
)

CONTEXT_BYTES = 1.5 * GIB
"""Of a process on a GPU before it has anything: CUDA's context, kernels, workspaces, NCCL's buffers. An assumption."""
PROCESS_BYTES = 2 * GIB
"""Of a process in host memory, with torch and CUDA, before it has anything. An assumption."""
OFFLOADED_BYTES = 9 * MAIN_BYTES * 2**24
"""Of a step with offloaded moments: pieces on their way, see `training.offloaded_adam`, and what Adam makes of one."""
ENGINE_SHARE = 0.85
"""Of a GPU, which SGLang takes for weights and keys and values where `mem_fraction_static` does not say; about."""


def longest_row(config: Config) -> int:
    """Tokens of the longest prompt and response; a micro-batch takes a row whole, however few it is to have."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def actor(config: Config, spec: ModelSpec, group: str, per_node: int) -> Footprint:
    """Of the pipeline stage with the most; ``per_node``: its ranks on a node."""
    stages = [_actor_stage(config, spec, group, per_node, stage) for stage in range(config.actor.parallel.pipeline)]
    return max(stages, key=lambda stage: stage.peak)


def _actor_stage(config: Config, spec: ModelSpec, group: str, per_node: int, stage: int) -> Footprint:
    settings, parallel, item = config.actor, config.actor.parallel, ITEM_BYTES[config.model.dtype]
    count, last = parameters(spec, parallel, stage), stage == parallel.pipeline - 1
    alike = parallel.data * parallel.context
    sharing, offloaded = alike if settings.optimizer.distributed else 1, settings.optimizer.offload
    # Under float32 the parameters are the main parameters.
    main = MAIN_BYTES * count / sharing if item < MAIN_BYTES else 0
    moments_of_adam = 2 * MAIN_BYTES * count / sharing
    states = main + moments_of_adam
    tokens = max(settings.max_tokens_per_micro_batch, -(-longest_row(config) // parallel.context))
    # One forward, one backward: a stage is ahead of the last by as many micro-batches as there are stages after it.
    in_flight, layers = parallel.pipeline - stage, spec.layers // parallel.pipeline
    kept = kept_elements(spec, parallel, settings.recompute) * layers * in_flight * tokens * item
    # Of the last stage: what the final norm gives, in order and with its gradient.
    kept += 3 * spec.hidden * tokens * item if last else 0
    working = working_elements(spec, parallel, settings.recompute) * tokens * item
    # One kernel needs nothing beside; several, a square root of each second moment.
    updating = 0.0 if settings.kernels == "fused" else MAIN_BYTES * count / sharing
    if offloaded:
        updating = OFFLOADED_BYTES
    moments = {
        "backward": {"activations": kept, "a layer's backward": working},
        "update": {"optimizer step": updating},
    }
    if last:
        entropy = config.algorithm.needs_entropy
        logits = logits_bytes(spec, parallel, tokens, item, settings.kernels, entropy)
        moments["output layer"] = {"activations": kept, "logits": logits}
    if sharing > 1:
        # megatron-core gathers one kind of state at a time from all data-parallel ranks, and joins the pieces.
        moments["checkpoint"] = {"gathered states": 2 * MAIN_BYTES * count}
        if offloaded:
            moments["resume"] = {"states that are loaded": moments_of_adam}
    slabs = config.weights.slabs or config.max_staleness + 2
    copies = slabs + (1 if config.weights.anchor_every else 0)
    pinned = {
        "slabs": copies * count * item / alike * per_node,
        "checkpoint": (count * item + states * sharing) / alike * per_node,
    }
    if offloaded:
        pinned["optimizer states"] = moments_of_adam * per_node
    if inner := _inner_copies(config):
        pinned["weights of forward roles"] = inner * count * item * per_node
    host = {"processes": per_node * PROCESS_BYTES}
    if sharing > 1:
        host["states gathered for a checkpoint"] = 3 * MAIN_BYTES * count * per_node
    return Footprint(
        role="actor",
        group=group,
        split=_split(parallel, f"{tokens:,} tokens a micro-batch, recomputed: {settings.recompute}"),
        gpus=parallel.ranks,
        resident={
            "weights": count * item,
            "gradients": MAIN_BYTES * count,
            "optimizer states": main if offloaded else states,
            "CUDA, NCCL": CONTEXT_BYTES,
        },
        moments=moments,
        pinned=pinned,
        host=host,
    )


def _inner_copies(config: Config) -> int:
    """Copies of the weights that forward roles inside of the actor keep; see `roles.inner`."""
    roles = config.actor.forward
    return ("reference" in roles) + ("actor_fwd" in roles and config.algorithm.mini_batches > 1)


def forward(config: Config, spec: ModelSpec, role: str, group: str, per_node: int) -> Footprint:
    """Of actor_fwd or the reference, ``role``; of the pipeline stage with the most."""
    settings = getattr(config, role)
    parallel, item = settings.parallel, ITEM_BYTES[config.model.dtype]
    tokens = max(settings.max_tokens_per_micro_batch, -(-longest_row(config) // parallel.context))
    found = []
    for stage in range(parallel.pipeline):
        passing = {"activations": scored_elements(spec, parallel) * tokens * item}
        if stage == parallel.pipeline - 1:
            passing["logits"] = logits_bytes(spec, parallel, tokens, item, config.actor.kernels, entropy=False)
        weights = parameters(spec, parallel, stage) * item
        found.append(
            Footprint(
                role=role,
                group=group,
                split=_split(parallel, f"{tokens:,} tokens a micro-batch"),
                gpus=parallel.ranks,
                resident={"weights": weights, "CUDA, NCCL": CONTEXT_BYTES},
                moments={"forward": passing},
                host={"processes": per_node * PROCESS_BYTES},
            )
        )
    return max(found, key=lambda stage: stage.peak)


def engine(config: Config, spec: ModelSpec, group: str, per_node: int, gpu_bytes: float) -> Footprint:
    """Of SGLang: the share of the GPU that it takes at once, of which weights leave the rest to keys and values.

    ``per_node``: engines on a node.
    """
    flags, item, longest = config.rollout.engine.flags, ITEM_BYTES[config.model.dtype], longest_row(config)
    tensor, pipeline = (int(engine_flag(flags, name) or 1) for name in ("tp_size", "pp_size"))
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
        split=f"{config.rollout.replicas} engines, tensor {tensor}, pipeline {pipeline}",
        gpus=config.rollout.replicas * tensor * pipeline,
        resident={"weights": weights, "keys and values": room, "CUDA, NCCL, graphs": CONTEXT_BYTES},
        pinned={"weights of a version": whole},
        host={"processes": per_node * (1 + tensor * pipeline) * PROCESS_BYTES},
        note=f"keys and values of {kept:,} tokens, {kept // longest:,} rows of {longest:,}{said}",
        lack=_misplaced(config, spec, group, tensor, pipeline)
        or ("" if kept >= longest else f"{need}, and {room / GIB:.1f} are left"),
    )


def _misplaced(config: Config, spec: ModelSpec, group: str, tensor: int, pipeline: int) -> str:
    """Why engines cannot be cut so, or have not as many GPUs; empty: they can."""
    if spec.heads % tensor:
        return f"rollout.engine.flags.tp_size: found {tensor}, allowed: divisors of the {spec.heads} attention heads"
    resources, replicas = config.groups[group].resources, config.rollout.replicas
    there, taken = resources.nodes * resources.gpus_per_node, replicas * tensor * pipeline
    if there and taken > there:
        cut = f"{replicas} engines of tp_size {tensor}" + (f" and pp_size {pipeline}" if pipeline > 1 else "")
        return f"{cut} take {taken} GPUs, and group {group} has {there}; fewer rollout.replicas, or more nodes"
    return ""


def engine_flag(flags: Mapping[str, Any], name: str) -> float:
    """0 where it is not set, or is nothing that SGLang would take."""
    found = flags.get(name)
    return found if type(found) in (int, float) and found >= (1 if name.endswith("_size") else 0) else 0


def _split(parallel: ParallelConfig, more: str) -> str:
    sequence = ", sequence parallel" if parallel.sequence_parallel and parallel.tensor > 1 else ""
    cut = f"tensor {parallel.tensor}, pipeline {parallel.pipeline}, data {parallel.data}{sequence}"
    return f"{cut}; {more}"
