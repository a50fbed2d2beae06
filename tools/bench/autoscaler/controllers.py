"""Controllers of a simulated run: the policy of the product, a fixed number, and the oracle."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulation import Controller, Result, Shape, Simulation

from relax_hpc.config.schema.autoscaler import AutoscalerConfig
from relax_hpc.service.autoscaler.observations import Facts, ObservationLog
from relax_hpc.service.autoscaler.policy import Decision, Limits, PolicyState, decide, state_after

_LEADS = (0.0, 0.5, 1.0, 2.0)
"""Start times by which a schedule of the oracle is ahead of the load."""
_HEADROOMS = (0.9, 0.95, 1.0, 1.05, 1.1)
_STEPS_SHARE = 0.98
"""Share of the most steps that the oracle must have."""
_LOOK_S = 10.0


class PolicyController:
    """The policy of the product, as its loop applies it."""

    def __init__(self, policy: AutoscalerConfig, shape: Shape) -> None:
        self.policy, self.limits, self.state = policy, Limits(1, shape.max_engines), PolicyState()
        self.decisions: list[tuple[float, Decision]] = []

    def __call__(self, time_s: float, log: ObservationLog, facts: Facts) -> int:
        start_s = facts.start_s or self.policy.start_s
        observed = log.observe(facts, self.policy.window_s, self.policy.cooldown_in * start_s)
        decision = decide(observed, self.policy, self.limits, self.state)
        self.decisions.append((time_s, decision))
        self.state = state_after(self.state, decision, time_s)
        return decision.target


def fixed(engines: int) -> Controller:
    return lambda time_s, log, facts: engines


def clairvoyant(shape: Shape, lead_s: float, headroom: float, holds: bool) -> Controller:
    """A schedule that knows the load: the need in ``lead_s`` seconds, or with ``holds`` the
    largest need until then, times ``headroom``."""

    def control(time_s: float, log: ObservationLog, facts: Facts) -> int:
        times_s = [time_s + lead_s]
        if holds:
            times_s = [time_s + _LOOK_S * look for look in range(int(lead_s / _LOOK_S) + 1)]
        need = max(shape.need(time) for time in times_s)
        return max(1, math.ceil(need * headroom - 1e-9))

    return control


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over seeds."""

    steps: float
    node_hours: float
    trainer_wait: float
    changes: float

    @property
    def steps_per_node_hour(self) -> float:
        return self.steps / self.node_hours


def simulate(shape: Shape, controllers: Iterable[Controller], seeds: Sequence[int]) -> Outcome:
    """Simulate each seed with its own controller."""
    pairs = zip(controllers, seeds, strict=False)
    return mean_outcome([Simulation(shape, control, seed).run() for control, seed in pairs])


def mean_outcome(results: Sequence[Result]) -> Outcome:
    return Outcome(
        steps=statistics.mean(result.steps for result in results),
        node_hours=statistics.mean(result.node_hours for result in results),
        trainer_wait=statistics.mean(result.trainer_wait for result in results),
        changes=statistics.mean(result.changes for result in results),
    )


def run_policy(shape: Shape, policy: AutoscalerConfig, seeds: Sequence[int]) -> Outcome:
    return simulate(shape, (PolicyController(policy, shape) for _ in seeds), seeds)


def run_fixed(shape: Shape, engines: int, seeds: Sequence[int]) -> Outcome:
    return simulate(shape, itertools.repeat(fixed(engines)), seeds)


def run_oracle(shape: Shape, seeds: Sequence[int]) -> Outcome:
    """The oracle: of 40 schedules that know the load of every future second and the mean start
    time, the one with the most steps per node-hour among those with at least 98 % of the most
    steps of any schedule.

    The schedules differ in how far they are ahead of the load (0 to 2 mean start times), in
    whether they keep engines through short lulls, and in their headroom (0.9 to 1.1). The choice is
    made after the fact, for each load, with the same seeds. It is no proven optimum: a schedule
    outside this set, or one that also knows the start time of each single engine, may be better.
    """
    options = itertools.product(_LEADS, _HEADROOMS, (False, True))
    outcomes = []
    for lead, headroom, holds in options:
        control = clairvoyant(shape, lead * shape.start_s, headroom, holds)
        outcomes.append(simulate(shape, itertools.repeat(control), seeds))
    most = max(outcome.steps for outcome in outcomes)
    enough = [outcome for outcome in outcomes if outcome.steps >= _STEPS_SHARE * most]
    return max(enough, key=lambda outcome: outcome.steps_per_node_hour)
