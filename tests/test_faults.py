"""Whole runs in which processes are killed: one group comes back, the others go on, and no sample is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from relax_hpc.weights.subscriber import staging_root
from tests.audit import audit
from tests.requirements import requires
from tests.run_helpers import Running, merged, rollbacks, running, trained_steps

requires("mpi", "torch", "megatron", "transformers")

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
    return {group: [p.pid for role in roles for p in live.processes(role)] for group, roles in GROUPS.items()}


def newest_step(live: Running) -> int:
    """The last step with a line in the metrics."""
    return max((row["step"] for row in trained_steps(live.run)), default=-1)


def group_of(role: str) -> str:
    return next(group for group, roles in GROUPS.items() if role in roles)


def kill_and_recover(live: Running, role: str, rank: int = 0) -> None:
    """Kill a process of `role`; training must go on, with no other group touched."""
    group = group_of(role)
    before, epochs = pids(live), {name: live.epochs(name) for name in GROUPS}
    step = newest_step(live)
    victim = live.processes(role)[rank]
    victim.kill()
    live.wait_until(lambda: live.epochs(group) == epochs[group] + 1, f"{group} has a new epoch", 30.0)
    live.wait_for_step(step + 2, START_S)
    after = pids(live)
    for name in GROUPS:
        if name == group:
            assert len(after[name]) == len(before[name]) and not {*after[name]} & {*before[name]}
        else:
            assert after[name] == before[name], f"{name} was touched by the death of {role}\n{live.story()}"
            assert live.epochs(name) == epochs[name]


def assert_clean_end(live: Running, family: list[psutil.Process]) -> None:
    """The run succeeded and left no process, no staged weights."""
    live.finish(START_S)
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not staging_root(live.run).exists()


def test_every_role_can_die(tmp_path: Path) -> None:
    over = {"steps": 32, "checkpoint": {"every": 4}}
    with running(tmp_path, over) as live:
        live.wait_for_step(1, START_S)
        for role in ("rollout", "reference", "actor_fwd", "advantages", "controller"):
            kill_and_recover(live, role)
        live.wait_until(lambda: [*live.run.checkpoints.glob("e*-step-*")], "a checkpoint", START_S)
        kill_and_recover(live, "actor")
        assert_clean_end(live, psutil.Process(live.process.pid).children(recursive=True))
    assert [row["step"] for row in trained_steps(live.run)] == list(range(32))
    assert len(rollbacks(live.run)) == 1
    result = audit(live.run)
    assert result.problems == []
    assert set(result.dropped) <= {"rolled_back"} and not result.failed
