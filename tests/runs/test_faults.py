"""Whole runs in which processes are killed: one group comes back, the others go on, and no sample
is lost."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from relax_hpc.base.errors import EXIT_NO_PROGRESS
from relax_hpc.cluster.sandbox.processes import alive, until_gone
from relax_hpc.training.weights.node_cache import staging_root
from tests.helpers.audit import audit
from tests.helpers.run_helpers import (
    LIGHT,
    Running,
    merged,
    open_to_others,
    rollbacks,
    running,
    trained_steps,
    with_engine,
)
from tests.requirements import requires

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

GROUPS = {
    "hub": ("controller", "advantages"),
    "rollout": ("rollout",),
    "actor": ("actor",),
    "actor_fwd": ("actor_fwd",),
    "reference": ("reference",),
}
START_S = 240.0
STEP_S = 120.0


def pids(live: Running) -> dict[str, list[int]]:
    """Living processes by group."""
    return {
        group: [p.pid for role in roles for p in live.processes(role)]
        for group, roles in GROUPS.items()
    }


def newest_step(live: Running) -> int:
    """The last step with a line in the metrics."""
    return max((row["step"] for row in trained_steps(live.run)), default=-1)


def group_of(role: str) -> str:
    return next(group for group, roles in GROUPS.items() if role in roles)


def kill_and_recover(live: Running, role: str, rank: int = 0) -> None:
    """Kill a process of `role`; training must go on, with no other group touched."""
    group = group_of(role)
    before, incarnations = pids(live), {name: live.incarnations(name) for name in GROUPS}
    step = newest_step(live)
    victim = live.processes(role)[rank]
    victim.kill()
    live.wait_until(
        lambda: live.incarnations(group) == incarnations[group] + 1,
        f"{group} has a new incarnation",
        30.0,
    )
    live.wait_for_step(step + 2, START_S)
    after = pids(live)
    for name in GROUPS:
        if name == group:
            assert len(after[name]) == len(before[name]) and not {*after[name]} & {*before[name]}
        else:
            assert after[name] == before[name], (
                f"{name} was touched by the death of {role}\n{live.story()}"
            )
            assert live.incarnations(name) == incarnations[name]


def assert_clean_end(live: Running, family: list[psutil.Process]) -> None:
    """The run succeeded and left no process, no staged weights, and nothing that others could read
    or write."""
    live.finish(START_S)
    assert not open_to_others(live.run.root)
    until_gone(family, START_S)
    assert not [process for process in family if alive(process)]
    assert not staging_root(live.run).exists()


def test_every_role_can_die(tmp_path: Path) -> None:
    """Of an asynchronous run, whose actor has two tensor-parallel ranks."""
    steps, parallel = 60, {"parallel": {"tensor": 2}, "optimizer": {"lr": 1e-3}}
    over = {"steps": steps, "max_staleness": 2, "checkpoint": {"every": 4}, "actor": parallel}
    over |= {
        "model": {"tiny": {"num_key_value_heads": 2}},
        "groups": {"reference": {"roles": ["reference"]}},
    }
    over |= with_engine("simulated")
    with running(tmp_path, over) as live:
        live.wait_for_step(1, START_S)
        assert len(live.processes("actor")) == 2
        for role in ("rollout", "reference", "actor_fwd", "advantages", "controller"):
            kill_and_recover(live, role)
        live.wait_until(lambda: [*live.run.checkpoints.glob("i*-step-*")], "a checkpoint", START_S)
        kill_and_recover(live, "actor", rank=1)
        assert_clean_end(live, psutil.Process(live.process.pid).children(recursive=True))
    rows = trained_steps(live.run)
    assert [row["step"] for row in rows] == list(range(steps)) and len(rollbacks(live.run)) <= 1
    assert 0 < max(row["staleness/max"] for row in rows) <= 2
    result = audit(live.run)
    # What a killed role had put and not yet written is lost, and made again.
    assert (
        result.problems == []
        and set(result.dropped) <= {"rolled_back", "lost"}
        and not result.failed
    )


def test_a_crash_loop_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(7)\n")
    groups = {"rollout": {"env": {"PYTHONPATH": str(tmp_path)}}}
    with running(
        tmp_path, merged(LIGHT, {"groups": groups, "liveness": {"max_restarts": 2}})
    ) as live:
        assert live.wait(START_S) == EXIT_NO_PROGRESS, live.story()
    last = live.output.read_text().splitlines()[-1]
    assert last.startswith("relax-hpc: error: rollout: ") and "ended with code 7" in last
    assert (
        "without new samples, steps or checkpoints" in last
        and "max_restarts" in last
        and str(live.run.logs("rollout", 3)) in last
    )
    assert live.incarnations("rollout") == 3 and live.incarnations("actor") == 1
    assert not staging_root(live.run).exists()


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """Ranks, whose parent is not ours, included."""
    over = merged(
        LIGHT, {"actor": {"parallel": {"tensor": 2}}, "model": {"tiny": {"num_key_value_heads": 2}}}
    )
    with running(tmp_path, over) as live:
        live.wait_until(
            lambda: len(live.processes("actor")) == 2, "both ranks have started", START_S
        )
        family = psutil.Process(live.process.pid).children(recursive=True)
        live.process.kill()
        gone, left = psutil.wait_procs(family, timeout=10.0)
    assert gone and not left
