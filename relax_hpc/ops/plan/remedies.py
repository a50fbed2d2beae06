"""Search for settings with which roles fit into their GPUs, the cheapest first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from relax_hpc.config.schema import Config, ParallelConfig
from relax_hpc.ops.plan.roles import ENGINE_SHARE, engine_flag, longest_row
from relax_hpc.training.models.expert_grouping import groups_experts
from relax_hpc.training.models.spec import ModelSpec

Change = dict[str, Any]
"""Settings to change: dotted keys -> values."""
MAX_TENSOR = 8
"""Largest number of tensor-parallel ranks. More than the GPUs of a node would be slow."""


def remedies(
    config: Config, spec: ModelSpec, roles: Sequence[str], fits: Callable[[Config], bool]
) -> list[str]:
    """Settings, each `key: value`, with which ``fits`` returns true; empty if none help.

    Changes are applied one after another until the roles fit. Then each change is removed that is
    not needed, the most expensive first.
    """
    applied: list[Change] = []
    changed = copy.deepcopy(config)
    for change in _changes(changed, spec, roles):
        apply(changed, change)
        applied.append(change)
        if fits(changed):
            needed = _needed(config, applied, fits)
            return [f"{key}: {_format_value(value)}" for key, value in needed.items()]
    return []


def _needed(config: Config, applied: Sequence[Change], fits: Callable[[Config], bool]) -> Change:
    """The changes of ``applied`` without those that are not needed, as one change."""
    needed = list(applied)
    for change in reversed(applied):
        trial = copy.deepcopy(config)
        for other in needed:
            if other is not change:
                apply(trial, other)
        if fits(trial):
            needed.remove(change)
    settings: Change = {}
    for change in needed:
        settings |= change
    return settings


def _changes(config: Config, spec: ModelSpec, roles: Sequence[str]) -> Iterator[Change]:
    """Changes to try, the cheapest first.

    The caller applies each of them to ``config`` before it asks for the next.
    """
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}
    if "actor" in roles:
        if groups_experts(config.actor.experts, spec, config.model, config.actor.parallel):
            yield {"actor.experts": "sequential"}
        yield from _actor_changes(config)
    for role in {"actor", "actor_fwd", "reference"}.intersection(roles):
        settings = getattr(config, role)
        while (tokens := settings.max_tokens_per_micro_batch) > longest_row(config):
            yield {f"{role}.max_tokens_per_micro_batch": max(longest_row(config), tokens // 2)}
        yield from _parallel_changes(config, spec, role)
    if "rollout" in roles:
        yield from _engine_changes(config, spec)


def _actor_changes(config: Config) -> Iterator[Change]:
    actor = config.actor
    if actor.parallel.data > 1 and not actor.optimizer.distributed:
        yield {"actor.optimizer.distributed": True}
    if actor.parallel.tensor > 1 and not actor.parallel.sequence_parallel:
        yield {"actor.parallel.sequence_parallel": True}
    if actor.recompute != "full":
        yield {"actor.recompute": "full"}
    if not actor.optimizer.offload:
        yield {"actor.optimizer.offload": True}


def _parallel_changes(config: Config, spec: ModelSpec, role: str) -> Iterator[Change]:
    """More ranks for experts, then more tensor parallelism.

    If the number of data-parallel ranks is even, it is halved, so that the number of GPUs stays.
    """
    parallel = getattr(config, role).parallel
    yield from _expert_changes(parallel, spec, role)
    while (tensor := parallel.tensor * 2) <= MAX_TENSOR:
        if any(spec.split_errors(replace(parallel, tensor=tensor, sequence_parallel=True))):
            return
        change: Change = {
            f"{role}.parallel.tensor": tensor,
            f"{role}.parallel.sequence_parallel": True,
        }
        if parallel.data % 2 == 0:
            change[f"{role}.parallel.data"] = parallel.data // 2
        yield change
        yield from _expert_changes(parallel, spec, role)


def _expert_changes(parallel: ParallelConfig, spec: ModelSpec, role: str) -> Iterator[Change]:
    while True:
        expert = parallel.expert * 2
        if any(spec.split_errors(replace(parallel, expert=expert))):
            return
        yield {f"{role}.parallel.expert": expert}


def _engine_changes(config: Config, spec: ModelSpec) -> Iterator[Change]:
    flags = config.rollout.engine.flags
    if 0 < engine_flag(flags, "mem_fraction_static") < ENGINE_SHARE:
        yield {"rollout.engine.flags.mem_fraction_static": ENGINE_SHARE}
    while True:
        size = int(engine_flag(flags, "tp_size") or 1) * 2
        if size > MAX_TENSOR or spec.heads % size:
            return
        change: Change = {"rollout.engine.flags.tp_size": size}
        if config.rollout.replicas % 2 == 0:
            change["rollout.replicas"] = config.rollout.replicas // 2
        yield change


def apply(config: Config, change: Change) -> None:
    """Set the dotted keys of ``change`` in ``config``."""
    for key, value in change.items():
        *sections, name = key.split(".")
        target: Any = config
        for section in sections:
            target = target[section] if isinstance(target, dict) else getattr(target, section)
        if isinstance(target, dict):
            target[name] = value
        else:
            setattr(target, name, value)


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
