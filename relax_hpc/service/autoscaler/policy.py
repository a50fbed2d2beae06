"""The policy of the autoscaler: a pure function from observations to a target.

The side that waits decides whether to act. If the trainer waits and the engines do not, engines are
added. If engines wait and the trainer does not need them, engines are removed. If both wait, a few
long prompt groups delay the step, and further engines would not finish these groups sooner.

The size of a change follows from the need: the seconds of one engine that a prompt group takes,
times the prompt groups per second that the trainer takes while it has rows. The need does not
depend on the present number of engines, so that one change is enough after a change of the load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax_hpc.config.schema.autoscaler import AutoscalerConfig
from relax_hpc.service.autoscaler.observations import Observations

_MIN_COVERED = 0.5
"""Share of the short window that samples must cover."""
_STALLED = 0.9
"""Share of the short window after which a trainer that waits for rows is stalled."""
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Wall-clock times of the last changes, in seconds."""

    changed_s: float = -math.inf
    """Last change of the number of engines, by any client."""
    added_s: float = -math.inf
    """Last addition of engines, by any client."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Smallest and largest number of engines of the run."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Decision:
    """A target and its reason."""

    engines: int
    """Engines that serve or start at the time of the decision."""
    target: int
    """Number of engines that the run should have."""
    reason: str
    limit: str = ""
    """Name of the limit that made the target smaller or larger; empty: none did."""

    @property
    def line(self) -> str:
        """The decision in one line."""
        if self.target == self.engines:
            return f"hold {self.engines}: {self.reason}"
        direction = "out" if self.target > self.engines else "in"
        return f"{direction} {self.engines} -> {self.target}: {self.reason}"


def state_after(state: PolicyState, decision: Decision, time_s: float) -> PolicyState:
    """State after a decision was applied at ``time_s``."""
    if decision.target == decision.engines:
        return state
    added_s = time_s if decision.target > decision.engines else state.added_s
    return PolicyState(time_s, added_s)


def decide(
    observed: Observations, policy: AutoscalerConfig, limits: Limits, state: PolicyState
) -> Decision:
    """The number of engines that a run should have, and why."""
    engines = observed.engines
    if observed.facts.open_operation:
        return Decision(
            engines, engines, f"operation {observed.facts.open_operation} is not finished"
        )
    # Limits hold even if nothing was measured yet, or if a person exceeded them.
    largest, limit = _bound(observed, policy, limits)
    if engines > largest:
        return Decision(engines, largest, f"{engines} engines exceed {limit}", limit)
    if engines < limits.least:
        reason = f"{engines} engines are fewer than service.min_engines={limits.least}"
        return Decision(engines, limits.least, reason, "service.min_engines")
    target, reason = _wanted(observed, policy)
    if target > engines:
        return _add(observed, policy, state, Decision(engines, target, reason), (largest, limit))
    if target < engines:
        return _remove(observed, policy, state, Decision(engines, target, reason), limits)
    return Decision(engines, engines, reason)


def _wanted(observed: Observations, policy: AutoscalerConfig) -> tuple[int, str]:
    """The target without limits and cool-downs, and its reason."""
    engines, short = observed.engines, observed.short
    if short.covered_s < _MIN_COVERED * observed.wanted_s:
        return engines, f"{short.covered_s:.0f} of {observed.wanted_s:.0f} s were observed so far"
    need, long_need = observed.need(short), observed.need(observed.long)
    if need is None or long_need is None:
        return _wanted_without_need(observed, policy)
    target, long_target = _with_headroom(need, policy), _with_headroom(long_need, policy)
    reason = _explain(observed, need)
    if target > engines and long_target > engines and observed.now.engine_wait > policy.engine_wait:
        share = f"{observed.now.engine_wait:.0%}"
        return engines, f"{reason}; engines wait too ({share} now), more would not help"
    if observed.now.engine_wait <= policy.engine_wait:
        if need > engines * (1 + policy.hysteresis):
            return max(target, engines), reason
        if min(short.trainer_wait, observed.long.trainer_wait) > policy.trainer_wait:
            return max(min(target, long_target), engines), reason
    # The larger of two targets: a removal needs a low load now and over the whole cool-down.
    if max(target, long_target) < engines:
        return max(target, long_target), reason
    return engines, reason


def _wanted_without_need(observed: Observations, policy: AutoscalerConfig) -> tuple[int, str]:
    """The target while no step was trained or no prompt group was accepted in the window."""
    engines, short = observed.engines, observed.short
    if short.trainer_wait < _STALLED:
        return engines, "the need is unknown until a step is trained and rows are accepted"
    if short.accepted_groups == 0:
        oldest_s = observed.facts.oldest_generation_s
        text = f"no prompt group was accepted for {short.covered_s:.0f} s, oldest {oldest_s:.0f} s"
        return engines, f"{text}; the engines may hang, see relax-hpc status"
    # Before the first step, the trainer waits for the first prompt groups in any case.
    if (
        short.covered_s < observed.wanted_s * _STALLED
        or observed.now.engine_wait > policy.engine_wait
    ):
        return engines, "the trainer waits for rows"
    missing = observed.facts.step_groups - observed.facts.ready_groups
    remaining_s = missing * short.covered_s / short.accepted_groups
    if remaining_s < (observed.facts.start_s or policy.start_s):
        return engines, f"the trainer waits, the step is complete in {remaining_s:.0f} s"
    return 2 * engines, (
        f"the trainer waits {short.trainer_wait:.0%} of {short.covered_s:.0f} s, "
        f"{remaining_s:.0f} s until its first step is complete"
    )


def _with_headroom(need: float, policy: AutoscalerConfig) -> int:
    return max(1, math.ceil(need * (1 + policy.headroom) - 1e-9))


def _explain(observed: Observations, need: float) -> str:
    short = observed.short
    return (
        f"trainer waits {short.trainer_wait:.0%}, engines {short.engine_wait:.0%} of "
        f"{short.covered_s:.0f} s; need {need:.1f} ({short.group_engine_s:.3g} engine-s a group x "
        f"{observed.trainer_groups_per_s:.3g} groups/s)"
    )


def _bound(observed: Observations, policy: AutoscalerConfig, limits: Limits) -> tuple[int, str]:
    """The largest number of engines that settings permit, and the setting."""
    largest, name = limits.most, f"service.max_engines={limits.most}"
    if policy.budget_node_hours:
        remaining = policy.budget_node_hours - observed.facts.node_hours_used
        engine_hours = observed.facts.nodes_per_engine * policy.budget_reserve_s / 3600.0
        affordable = max(limits.least, math.floor(remaining / engine_hours))
        if affordable < largest:
            used = (
                f"{observed.facts.node_hours_used:.1f} of {policy.budget_node_hours:g} node-hours"
            )
            largest, name = affordable, f"the budget ({used} are used)"
    return largest, name


def _add(
    observed: Observations,
    policy: AutoscalerConfig,
    state: PolicyState,
    wanted: Decision,
    bound: tuple[int, str],
) -> Decision:
    """An addition, as far as limits and Slurm permit it."""
    facts, start_s = observed.facts, observed.facts.start_s or policy.start_s
    engines, target, reason, limit = wanted.engines, wanted.target, wanted.reason, ""
    cooldown_s = policy.cooldown * start_s
    if observed.time_s - state.changed_s < cooldown_s:
        return Decision(engines, engines, f"{reason}; cool-down of {cooldown_s:.0f} s", "cooldown")
    left_s = facts.job_time_left_s
    if left_s is not None and left_s < policy.payback * start_s:
        text = f"{reason}; the job ends in {left_s:.0f} s, a start takes {start_s:.0f} s"
        return Decision(engines, engines, text, "payback")
    expected_s = facts.expected_start_s
    if expected_s is not None and expected_s > policy.max_start_wait_s:
        text = f"{reason}; Slurm starts the pending engine in {expected_s / _MINUTE_S:.0f} min"
        return Decision(engines, engines, text, "max_start_wait_s")
    caps = [(bound[0], bound[1])]
    if policy.max_change:
        caps.append((engines + policy.max_change, f"max_change={policy.max_change}"))
    if facts.idle_nodes is not None:
        # Engines that start may be pending, and then need idle nodes too.
        idle_engines = math.floor(facts.idle_nodes / facts.nodes_per_engine)
        room = max(0, idle_engines + policy.max_pending - facts.starting)
        text = f"{facts.idle_nodes} idle nodes and max_pending={policy.max_pending}"
        caps.append((engines + room, text))
    smallest, name = min(caps, key=lambda cap: cap[0])
    if target > smallest:
        target, limit = max(smallest, engines), name
        reason = f"{reason}; limited by {name}"
    return Decision(engines, target, reason, limit)


def _remove(
    observed: Observations,
    policy: AutoscalerConfig,
    state: PolicyState,
    wanted: Decision,
    limits: Limits,
) -> Decision:
    """A removal, as far as limits and the KV cache permit it."""
    start_s = observed.facts.start_s or policy.start_s
    engines, target, reason, limit = wanted.engines, wanted.target, wanted.reason, ""
    cooldown_s = policy.cooldown_in * start_s
    if observed.time_s - state.added_s < cooldown_s:
        text = f"{reason}; cool-down of {cooldown_s:.0f} s after an addition"
        return Decision(engines, engines, text, "cooldown_in")
    if observed.time_s - state.changed_s < policy.cooldown * start_s:
        text = f"{reason}; cool-down of {policy.cooldown * start_s:.0f} s"
        return Decision(engines, engines, text, "cooldown")
    floors = [(limits.least, f"service.min_engines={limits.least}")]
    if policy.max_change:
        floors.append((engines - policy.max_change, f"max_change={policy.max_change}"))
    if observed.facts.kv_use is not None:
        # The same prompts fill the caches of fewer engines.
        full = math.ceil(observed.serving * observed.facts.kv_use / policy.kv_brake - 1e-9)
        floors.append((full, f"kv_brake ({observed.facts.kv_use:.0%} of the KV caches are in use)"))
    largest, name = max(floors, key=lambda floor: floor[0])
    if target < largest:
        target, limit = min(largest, engines), name
        reason = f"{reason}; limited by {name}"
    return Decision(engines, target, reason, limit)
