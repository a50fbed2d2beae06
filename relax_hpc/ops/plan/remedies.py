"""Settings with which a role would fit into its GPUs: those that cost least first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from relax_hpc.config.schema import Config, ParallelConfig
from relax_hpc.ops.plan.roles import ENGINE_SHARE, engine_flag, longest_row
from relax_hpc.training.models.spec import ModelSpec

Change = dict[str, Any]
"""Change of a configuration: dotted keys -> values."""
MAX_TENSOR = 8
"""Ranks that share a matrix: more than a node has GPUs is slow."""


def remedies(
    config: Config, spec: ModelSpec, roles: Sequence[str], fits: Callable[[Config], bool]
) -> list[str]:
    """The settings, `key: value`, with which ``fits``; none if there are none.

    One after the other is made until it does; then those are taken back without which it does too,
    dearest first.
    """
    made: list[Change] = []
    now = copy.deepcopy(config)
    for change in _changes(now, spec, roles):
        apply(now, change)
        made.append(change)
        if fits(now):
            needed = _needed(config, made, fits)
            return [f"{key}: {_shown(value)}" for key, value in needed.items()]
    return []


def _needed(config: Config, made: Sequence[Change], fits: Callable[[Config], bool]) -> Change:
    kept = list(made)
    for change in reversed(made):
        trial = copy.deepcopy(config)
        for one in kept:
            if one is not change:
                apply(trial, one)
        if fits(trial):
            kept.remove(change)
    return {key: value for change in kept for key, value in change.items()}


def _changes(config: Config, spec: ModelSpec, roles: Sequence[str]) -> Iterator[Change]:
    """Changes that may be tried, looking at ``config`` as the changes so far have left it."""
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}
    if "actor" in roles:
        yield from _of_actor(config)
    for role in {"actor", "actor_fwd", "reference"}.intersection(roles):
        settings = getattr(config, role)
        while (tokens := settings.max_tokens_per_micro_batch) > longest_row(config):
            yield {f"{role}.max_tokens_per_micro_batch": max(longest_row(config), tokens // 2)}
        yield from _of_split(config, spec, role)
    if "rollout" in roles:
        yield from _of_engine(config, spec)


def _of_actor(config: Config) -> Iterator[Change]:
    actor = config.actor
    if actor.parallel.data > 1 and not actor.optimizer.distributed:
        yield {"actor.optimizer.distributed": True}
    if actor.parallel.tensor > 1 and not actor.parallel.sequence_parallel:
        yield {"actor.parallel.sequence_parallel": True}
    if actor.recompute != "full":
        yield {"actor.recompute": "full"}
    if not actor.optimizer.offload:
        yield {"actor.optimizer.offload": True}


def _of_split(config: Config, spec: ModelSpec, role: str) -> Iterator[Change]:
    """Experts over more ranks; and more tensor parallelism, by as many GPUs as before where data
    parallelism gives them."""
    parallel = getattr(config, role).parallel
    yield from _of_experts(parallel, spec, role)
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
        yield from _of_experts(parallel, spec, role)


def _of_experts(parallel: ParallelConfig, spec: ModelSpec, role: str) -> Iterator[Change]:
    while not any(spec.split_errors(replace(parallel, expert=(expert := parallel.expert * 2)))):
        yield {f"{role}.parallel.expert": expert}


def _of_engine(config: Config, spec: ModelSpec) -> Iterator[Change]:
    flags = config.rollout.engine.flags
    if 0 < engine_flag(flags, "mem_fraction_static") < ENGINE_SHARE:
        yield {"rollout.engine.flags.mem_fraction_static": ENGINE_SHARE}
    while (
        size := int(engine_flag(flags, "tp_size") or 1) * 2
    ) <= MAX_TENSOR and spec.heads % size == 0:
        change: Change = {"rollout.engine.flags.tp_size": size}
        if config.rollout.replicas % 2 == 0:
            change["rollout.replicas"] = config.rollout.replicas // 2
        yield change


def apply(config: Config, change: Change) -> None:
    """Make ``change`` in ``config``."""
    for key, value in change.items():
        *sections, name = key.split(".")
        place: Any = config
        for section in sections:
            place = place[section] if isinstance(place, dict) else getattr(place, section)
        if isinstance(place, dict):
            place[name] = value
        else:
            setattr(place, name, value)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
