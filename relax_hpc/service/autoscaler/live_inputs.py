"""Inputs of the autoscaler from the live state of a run: samples, facts, and earlier changes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

from relax_hpc.config.groups import base_name, group_with_role
from relax_hpc.config.schema import Config
from relax_hpc.queue.client import QueueStatus
from relax_hpc.queue.operations import (
    ACTIVE,
    JOINING,
    NOOP,
    OUT,
    SERVING,
    Operation,
)
from relax_hpc.service.autoscaler.observations import Sample
from relax_hpc.service.autoscaler.policy import PolicyState
from relax_hpc.service.engine_states import describe_engines
from relax_hpc.service.live_run import LiveRun

KEY = "autoscaler-"
"""Beginning of the idempotency keys of the autoscaler's operations."""
_STARTS = 8
"""Last additions from which the start time follows."""


def count_engines(live: LiveRun) -> tuple[int, int]:
    """Engines that serve, and engines that are starting."""
    assert live.status and live.present
    engines = describe_engines(live.status, live.present, live.wanted)
    states = [engine["state"] for engine in engines]
    return states.count(SERVING), states.count(JOINING)


def make_sample(live: LiveRun, status: QueueStatus) -> Sample:
    """The newest state of the run as a sample."""
    config = live.config
    serving, _ = count_engines(live)
    rollout = config.rollout
    return Sample(
        time_s=time.time(),
        serving=serving,
        generating=status.depth.get("generating", 0),
        slots=rollout.groups_per_request * rollout.requests_in_flight,
        trainer_waits=is_trainer_waiting(config, status),
        # Prompt groups that were trained or wait for it: all that were accepted and not dropped.
        accepted_groups=status.trained_steps * config.prompts_per_step
        + status.depth.get("ready", 0),
        trained_steps=status.trained_steps,
    )


def is_trainer_waiting(config: Config, status: QueueStatus) -> bool:
    """Whether the policy's trainer waits for rows: it has a request for rows that cannot be
    answered, and works on none. A request alone is not enough, because the trainer asks for the
    next rows while it trains."""
    group = group_with_role(config, "actor")
    asks = any(wait.startswith(f"{group}: claim") for wait in status.waiting)
    beats = [beat for beat in status.beats.values() if beat.get("group") == group]
    works = any(float(beat.get("busy_s", 0.0)) > 0.0 for beat in beats)
    return asks and not works


def nodes_per_engine(config: Config) -> float:
    group = group_with_role(config, "rollout")
    return config.groups[group].resources.nodes / config.rollout.replicas


def expected_start_s(live: LiveRun) -> float | None:
    """Seconds until Slurm expects to start the last pending group; None: none is expected."""
    assert live.present
    starts = [float(group.get("expected_start") or 0.0) for group in live.present.groups.values()]
    latest = max(starts, default=0.0)
    return max(0.0, latest - time.time()) if latest else None


def running_nodes(live: LiveRun) -> float:
    """Nodes of the rollout groups whose jobs run, from the hub's report of the groups."""
    assert live.present
    config = live.config
    rollout = group_with_role(config, "rollout")
    nodes = config.groups[rollout].resources.nodes
    names = [*live.present.groups, *live.present.ending]
    running = 0
    for name in names:
        state = live.present.groups.get(name, {}).get("state", "running")
        is_rollout = name == rollout or base_name(name, {rollout}) == rollout
        running += bool(is_rollout and state == "running")
    return float(running * nodes)


def measured_start_s(operations: Sequence[Operation]) -> float | None:
    """Median of the seconds of the last additions that succeeded; None: none succeeded."""
    starts = [
        operation.updated_at - operation.created_at
        for operation in operations
        if operation.kind == OUT and operation.state == ACTIVE
    ]
    return statistics.median(starts[-_STARTS:]) if starts else None


def policy_state(operations: Sequence[Operation]) -> PolicyState:
    """Times of the last changes, by any client."""
    changes = [operation for operation in operations if operation.state != NOOP]
    additions = [operation for operation in changes if operation.kind == OUT]
    return PolicyState(
        changed_s=max((operation.created_at for operation in changes), default=-math.inf),
        added_s=max((operation.created_at for operation in additions), default=-math.inf),
    )


def count_reversals(operations: Sequence[Operation], since_s: float) -> int:
    """Decisions of the autoscaler after ``since_s`` that another client reversed: its next
    operation after one of the autoscaler has the other direction."""
    reversals = 0
    former: Operation | None = None
    for operation in operations:
        # A member process that joins is no client that reverses a decision.
        is_join = bool(operation.body.get("members"))
        if operation.created_at < since_s or operation.state == NOOP or is_join:
            continue
        is_own = operation.key.startswith(KEY)
        if former and former.key.startswith(KEY) and not is_own:
            reversals += operation.kind != former.kind
        former = operation
    return reversals


def describe_open(operations: Sequence[Operation]) -> str:
    """An operation that is not final, with its state; empty: all are final."""
    for operation in operations:
        if operation.is_unfinished:
            return f"{operation.id} ({operation.state})"
    return ""
