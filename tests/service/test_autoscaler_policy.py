"""The policy of the autoscaler: one observation each, and whole runs in simulated time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from relax_hpc.config.schema.autoscaler import AutoscalerConfig
from relax_hpc.service.autoscaler.observations import (
    Facts,
    ObservationLog,
    Observations,
    Sample,
    Window,
)
from relax_hpc.service.autoscaler.policy import (
    Decision,
    Limits,
    PolicyState,
    decide,
    state_after,
)
from tests.effort import effort

POLICY, LIMITS = AutoscalerConfig(), Limits(1, 16)
NOW_S = 10_000.0


def a_window(**values: float | None) -> Window:
    """A minute in which 5 engines did what the trainer needs: 5 engine-s a group."""
    defaults = {
        "covered_s": 60.0,
        "trainer_wait": 0.0,
        "engine_wait": 0.0,
        "accepted_groups": 60.0,
        "group_engine_s": 5.0,
        "group_s": 10.0,
    }
    return Window(**defaults | values)  # type: ignore[arg-type]


def observe(
    serving: int = 5, facts: Facts | None = None, groups_per_s: float | None = 1.0, **window: float
) -> Observations:
    same = a_window(**window)
    return Observations(
        time_s=NOW_S,
        serving=serving,
        wanted_s=60.0,
        now=same,
        short=same,
        long=same,
        trainer_groups_per_s=groups_per_s,
        facts=facts or Facts(step_groups=32),
    )


def run_policy(seen: Observations, state: PolicyState | None = None, **policy: float) -> Decision:
    return decide(seen, AutoscalerConfig(**policy), LIMITS, state or PolicyState())


def test_the_side_that_waits_decides_and_the_need_gives_the_size():
    out = run_policy(observe(trainer_wait=0.4, group_engine_s=8.0))
    assert out.target == 10  # 8 engine-s x 1 group/s, and 15 % headroom
    assert out.line.startswith("out 5 -> 10: trainer waits 40%") and "\n" not in out.line
    assert run_policy(observe(engine_wait=0.7, group_engine_s=1.5)).target == 2
    assert run_policy(observe()).target == 5


def test_engines_are_added_before_the_trainer_waits_if_the_need_is_clearly_larger():
    assert run_policy(observe(group_engine_s=5.5)).target == 5
    assert run_policy(observe(group_engine_s=6.0)).target == 7


def test_nothing_is_added_if_both_sides_wait():
    decision = run_policy(observe(trainer_wait=0.4, engine_wait=0.3, group_engine_s=8.0))
    assert decision.target == 5 and "engines wait too" in decision.reason


def test_removal_needs_a_low_load_over_the_whole_cooldown():
    seen = observe(engine_wait=0.7, group_engine_s=1.5)
    busy_before = replace(seen, long=a_window(group_engine_s=3.0))
    assert run_policy(busy_before).target == 4
    recent = PolicyState(changed_s=NOW_S - 100.0, added_s=NOW_S - 100.0)
    assert run_policy(seen, recent).limit == "cooldown_in"
    # Cool-downs are multiples of the start time.
    quick = replace(seen, facts=replace(seen.facts, start_s=20.0))
    assert run_policy(quick, recent).target == 2


def test_an_addition_waits_one_start_after_any_change():
    seen = observe(trainer_wait=0.4, group_engine_s=8.0)
    state = state_after(PolicyState(), run_policy(seen), NOW_S - 30.0)
    assert state == PolicyState(NOW_S - 30.0, NOW_S - 30.0)
    assert run_policy(seen, state).limit == "cooldown"
    assert run_policy(seen, PolicyState(NOW_S - 61.0, NOW_S - 61.0)).target == 10


@pytest.mark.parametrize(
    ("facts", "policy", "target", "limit"),
    [
        ({}, {"max_change": 2}, 7, "max_change=2"),
        ({"idle_nodes": 0}, {}, 7, "0 idle nodes and max_pending=2"),
        ({"idle_nodes": 2, "starting": 0}, {"max_pending": 0}, 7, "2 idle nodes and max_pending=0"),
        ({"idle_nodes": 8, "nodes_per_engine": 4.0}, {}, 9, "8 idle nodes and max_pending=2"),
        ({"expected_start_s": 7200.0}, {}, 5, "max_start_wait_s"),
        ({"job_time_left_s": 120.0}, {}, 5, "payback"),
        ({"job_time_left_s": 3600.0}, {}, 16, "service.max_engines=16"),
        (
            {"node_hours_used": 99.0},
            {"budget_node_hours": 100.0},
            6,
            "the budget (99.0 of 100 node-hours are used)",
        ),
    ],
)
def test_limits_of_an_addition_are_named(facts, policy, target, limit):
    seen = observe(trainer_wait=0.4, group_engine_s=30.0, facts=Facts(step_groups=32, **facts))
    decision = run_policy(seen, **policy)
    assert (decision.target, decision.limit) == (target, limit)


def test_a_used_budget_leaves_the_least_engines_even_if_a_person_exceeded_it():
    used = observe(facts=Facts(step_groups=32, node_hours_used=101.0))
    decision = run_policy(used, budget_node_hours=100.0)
    assert decision.target == 1 and "exceed the budget (101.0 of 100" in decision.reason
    assert run_policy(observe(serving=20)).line == (
        "in 20 -> 16: 20 engines exceed service.max_engines=16"
    )
    few = decide(observe(), POLICY, Limits(8, 16), PolicyState())
    assert few.target == 8 and few.limit == "service.min_engines"


def test_the_kv_cache_brakes_a_removal():
    seen = observe(engine_wait=0.7, group_engine_s=1.5, facts=Facts(step_groups=32, kv_use=0.6))
    decision = run_policy(seen)
    assert decision.target == 4 and decision.limit.startswith("kv_brake")


def test_an_open_operation_and_a_short_window_hold():
    facts = Facts(step_groups=32, open_operation="so-000003 (CREATING)")
    busy = run_policy(observe(trainer_wait=1.0, facts=facts))
    assert busy.line == "hold 5: operation so-000003 (CREATING) is not finished"
    assert "20 of 60 s" in run_policy(observe(trainer_wait=1.0, covered_s=20.0)).reason


def test_a_step_that_does_not_advance_is_seen():
    slow = observe(groups_per_s=None, trainer_wait=1.0, accepted_groups=10.0)
    assert run_policy(slow).target == 10
    hung = observe(groups_per_s=None, trainer_wait=1.0, accepted_groups=0.0, group_s=math.inf)
    decision = run_policy(hung)
    assert decision.target == 5 and "may hang" in decision.reason


def a_sample(time_s: float, **values: float) -> Sample:
    defaults = {
        "serving": 2,
        "generating": 8,
        "slots": 4,
        "trainer_waits": False,
        "accepted_groups": time_s / 2,
        "trained_steps": int(time_s // 20),
    }
    return Sample(time_s=time_s, **defaults | values)  # type: ignore[arg-type]


def test_windows_of_samples():
    log = ObservationLog()
    for second in range(0, 101, 2):
        log.add(a_sample(float(second), trainer_waits=second % 20 >= 10))
    seen = log.observe(Facts(step_groups=10), window_s=40.0, cooldown_s=90.0)
    assert seen.short.covered_s == 40.0 and seen.long.covered_s == 90.0
    assert seen.short.trainer_wait == 0.5 and seen.short.engine_wait == 0.0
    # 2 busy engines make half a group per second; the trainer needs 10 s of 20 s for 10 groups.
    assert seen.short.group_engine_s == 4.0 and seen.trainer_groups_per_s == 1.0
    assert seen.need(seen.short) == 4.0


def test_a_gap_and_a_rollback_drop_what_was_before():
    log = ObservationLog(max_gap_s=15.0)
    for second in (0.0, 10.0, 20.0, 60.0, 70.0):
        log.add(a_sample(second))
    assert log.observe(Facts(), 60.0, 60.0).short.covered_s == 10.0
    log.add(a_sample(72.0, trained_steps=1))
    assert log.observe(Facts(), 60.0, 60.0).short.covered_s == 0.0


@pytest.fixture
def simulator(bench, monkeypatch):
    """A function that imports a module of tools/bench/autoscaler."""
    folder = Path(__file__).parents[2] / "tools/bench/autoscaler"
    monkeypatch.syspath_prepend(str(folder))
    return bench


@pytest.mark.parametrize("name", ["flat", "step", "saw-tooth"])
def test_a_simulated_run_is_near_the_oracle(simulator, name):
    loads, controllers = simulator("loads"), simulator("controllers")
    (shape,) = [shape for shape in loads.shapes() if shape.name == name]
    seeds = range(77, 77 + effort(1, 5))
    if effort(0, 1):
        oracle = controllers.run_oracle(shape, seeds)
    else:
        # One of the oracle's 40 schedules.
        known = controllers.clairvoyant(shape, shape.start_s, 1.05, False)
        oracle = controllers.simulate(shape, [known] * len(seeds), seeds)
    outcome = controllers.run_policy(shape, POLICY, seeds)
    efficiency = outcome.steps_per_node_hour / oracle.steps_per_node_hour
    assert efficiency >= loads.TARGETS[name]
    assert outcome.steps >= 0.97 * oracle.steps


def test_drawn_loads(simulator):
    loads, controllers = simulator("loads"), simulator("controllers")
    for seed in range(40, 40 + effort(1, 10)):
        shape, seeds = loads.random_shape(seed), range(effort(1, 3))
        oracle = controllers.run_oracle(shape, seeds)
        outcome = controllers.run_policy(shape, POLICY, seeds)
        assert outcome.steps >= 0.95 * oracle.steps, shape.name
        assert outcome.steps_per_node_hour >= 0.75 * oracle.steps_per_node_hour, shape.name
