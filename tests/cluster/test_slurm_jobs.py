"""One long run with a Slurm job for each group, to which everything happens, one by one: deaths,
lost nodes, jobs that make way and come back, and what its user commands.

A test for each, in this order; each leaves the run training. The engine is `simulated`, and SGLang
in the end, when the run is stopped and submitted again; env/test.sh --all has SGLang from the
beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_hpc.cluster.sandbox import Sandbox, processes
from relax_hpc.cluster.sandbox.processes import command_line
from tests.cluster.inspection import assert_can_be_inspected, attach_terminal
from tests.cluster.slurm_runs import (
    ENDLESS,
    ENGINE_START_S,
    GROUPS,
    LEASE_S,
    START_S,
    SlurmRun,
    kill_fault,
    submitted,
)
from tests.helpers.run_helpers import ALL, rollbacks, with_engine
from tests.helpers.slurm_sandbox import preempt, requires_sandbox
from tests.requirements import requires

requires("torch", "megatron", "transformers", "sglang", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

TWO_HEADS = {
    "steps": ENDLESS,
    "groups": {"hub": {"resources": {"nodes": 2}}},
    # Of the engine that comes in the end.
    "rollout": {"engine": {"flags": with_engine("sglang")["rollout"]["engine"]["flags"]}},
}
WHY = (
    "happens to the run of test_slurm_het.py too, or here to another group; all of them: "
    "env/test.sh --all"
)
in_all = pytest.mark.skipif(not ALL, reason=WHY)


@pytest.fixture(scope="module")
def run(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRun]:
    """On seven nodes, of all groups but the last two."""
    with submitted(sandbox, tmp_path_factory.mktemp("jobs"), "jobs", TWO_HEADS) as live:
        live.wait_for_step(2)
        yield live


@pytest.fixture
def live(run: SlurmRun) -> SlurmRun:
    """The run, unless an earlier test has lost it."""
    assert not run.broken, f"an earlier test has lost the run: {run.broken}"
    return run


@pytest.mark.parametrize(
    ("group", "role", "rank", "moment"),
    [
        ("actor", "actor", 1, "weight publish"),
        ("actor_fwd", "actor_fwd", 0, ""),
        ("hub", "controller", 0, ""),
        ("hub", "advantages", 0, ""),
        pytest.param("rollout", "rollout", 0, "", marks=in_all),
    ],
)
def test_a_group_restarts_after_the_death_of_a_rank(
    live: SlurmRun, group: str, role: str, rank: int, moment: str
) -> None:
    """Its job starts the group again in place."""
    job = live.job(group)
    with live.only(group, kill_fault(role, moment)):
        live.kill(role, rank, moment)
    assert live.job(group) == job


# -- jobs make way, having saved, and are queued again under their number --------------------------


@pytest.mark.parametrize(
    ("group", "moment"),
    [
        ("rollout", "generation"),
        pytest.param("actor", "checkpoint", marks=in_all),
        pytest.param("actor", "training", marks=in_all),
    ],
)
def test_a_job_makes_way_at_the_early_signal(live: SlurmRun, group: str, moment: str) -> None:
    with comes_back(live, group, f"the early signal of the time limit during a {moment}"):
        live.signal_job(live.job(group), moment)


def test_a_job_makes_way_for_a_more_urgent_one(live: SlurmRun) -> None:
    """The actor has the partition's GraceTime to save. It is not started again in the job that
    ends."""
    incarnations = live.incarnations("actor")
    with comes_back(live, "actor", "preemption of the actor during a checkpoint"):
        (node, *_) = live.nodes_of("actor")
        live.at("checkpoint")
        preempt(live.sandbox, node)
    assert live.incarnations("actor") == incarnations + 1
    found = groups(live)
    assert [group["job"] for group in found.values()] == live.jobs
    assert all(group["nodes"] and group["time_left_s"] > 3000 for group in found.values())


@contextmanager
def comes_back(live: SlurmRun, group: str, fault: str) -> Iterator[None]:
    """In the block the job of a group ends in good order; it is queued again under its number, and
    no step is lost."""
    job, incarnation, before = live.job(group), live.newest(group), rollbacks(live.run)
    with live.only(group, fault):
        yield
    assert live.job(group) == job and live.mark(group, incarnation, group)["status"] in (
        "stopped",
        "failed",
    )
    assert rollbacks(live.run) == before, "steps were lost although there was time to save them"


# -- nodes lose power. The first of a job takes the supervisor along, and what knows of it first
# acts


def test_the_leading_node_of_the_hub_is_lost(live: SlurmRun) -> None:
    """The standby on the hub's other node takes over."""
    job, holder = live.job("hub"), live.lease_holder("supervisor-hub")
    with live.only("hub", "power loss of the leading node of the hub"):
        live.sandbox.kill_node(holder["node"])
        live.await_new_supervisor(holder["incarnation"], "supervisor-hub")
    assert live.job("hub") == job and live.lease_holder("supervisor-hub")["node"] != holder["node"]
    live.sandbox.start_node(holder["node"], rebooted=True)


@pytest.mark.parametrize(
    ("group", "rank"),
    [
        ("actor_fwd", 0),
        pytest.param("actor", 1, marks=in_all),
        pytest.param("actor", 0, marks=in_all),
    ],
)
def test_a_node_falls_silent(live: SlurmRun, group: str, rank: int) -> None:
    """The hub has another job take the group; where the supervisor lives, it does that itself."""
    job, node = live.job(group), live.nodes_of(group)[rank]
    where = "with its supervisor" if rank == 0 else "beside its supervisor's"
    with live.only(group, f"power loss of a node of {group}, {where}, which Slurm is not told of"):
        live.sandbox.kill_node(node)
        live.wait_until(lambda: live.job(group) != job, "another job takes the group", 4 * LEASE_S)
    assert node not in live.nodes_of(group)
    live.sandbox.start_node(node, rebooted=True)


@pytest.mark.parametrize(
    ("group", "role"),
    [
        ("rollout", "rollout"),
        ("hub", "advantages"),
        pytest.param("actor", "actor", marks=in_all),
    ],
)
def test_slurm_is_told_of_a_lost_node(live: SlurmRun, group: str, role: str) -> None:
    """It queues the job again, under its number and on other nodes."""
    job, node = live.job(group), live.nodes_of(role)[0]
    with live.only(group, f"power loss of a node of {group}"):
        live.lose_and_bring_back(node)
    assert live.job(group) == job


# -- batch scripts are killed: Slurm ends their jobs, and queues none of them again ----------------


@pytest.mark.parametrize("group", [pytest.param(name, marks=in_all) for name in ("hub", "actor")])
def test_a_batch_script_is_killed(live: SlurmRun, group: str) -> None:
    """The hub's job has a successor in the queue. The hub submits another job for a group."""
    former = live.job(group)
    with live.only(group, f"kill -9 of the batch script of the job of {group}"):
        kill(live, heads_of(live, group))
    assert live.job(group) != former and len(live.processes("controller")) == 1


def test_all_processes_are_killed(live: SlurmRun) -> None:
    """All its jobs are over. The hub's successor starts, and gives the other groups new jobs."""
    former = {group: live.job(group) for group in GROUPS}
    kill(live, live.processes())
    assert_continues(live)
    live.wait_until(lambda: live.job("hub") != former["hub"], "the hub has another job", START_S)
    assert_continues(live)
    live.train_steps()
    live.survived("kill -9 of all processes of the run")
    assert not set(former.values()) & {live.job(group) for group in GROUPS}


def heads_of(live: SlurmRun, group: str) -> list[psutil.Process]:
    """Processes of the batch script of a group's job, and of its standby."""
    command_words = {"relax_hpc.commands.head", "--group", group}
    return [process for process in live.processes() if command_words <= set(command_line(process))]


def kill(live: SlurmRun, victims: list[psutil.Process]) -> None:
    """SIGKILL to processes of which none sees the end of another."""
    processes.freeze(victims)
    processes.kill(victims)
    processes.until_gone(victims, START_S)


def assert_continues(live: SlurmRun) -> None:
    """`status` says that the run has not ended, and exits with 0."""
    assert json.loads(live.call("status", "--json"))["state"] in ("running", "queued", "starting")


# -- what the user commands ------------------------------------------------------------------------


def test_a_cancelled_job_comes_back_by_command(live: SlurmRun) -> None:
    """scancel is the user's wish, so nothing comes back by itself."""
    former = live.job("actor_fwd")
    with live.only("actor_fwd", "scancel of the group's component or job"):
        live.sandbox.client("scancel", former)
        live.wait_until(
            lambda: f"{former} " not in live.queued(), "the cancelled job is gone", START_S
        )
        live.call("resubmit", "--group", "actor_fwd")
    assert live.job("actor_fwd") != former


def test_rollout_is_replaced_by_a_smaller_one(live: SlurmRun) -> None:
    former, incarnation = live.job("rollout"), live.newest("rollout")
    with live.only("rollout", "resubmit with another size"):
        size = ["--nodes", "1", "--rollout.replicas", "1"]
        job = live.call("resubmit", "--group", "rollout", *size, "--parsable").strip()
    rollout = groups(live)["rollout"]
    assert job not in live.jobs and (rollout["job"], rollout["ranks"]) == (job, 1)
    assert rollout["incarnation"] == live.newest("rollout") > incarnation
    assert "," not in rollout["nodes"] and "-" not in rollout["nodes"]
    assert former not in live.queued()


def scale_to_one(live: SlurmRun) -> None:
    """Remove further groups of engines when the operation that added them has ended."""

    def is_accepted() -> bool:
        try:
            live.call("scale", "--replicas", "1")
        except AssertionError as error:
            if "wait for its end" in str(error):
                return False
            raise
        return True

    live.wait_until(is_accepted, "a further operation is accepted", live.patience_s)


def test_rollout_is_scaled_out_and_in(live: SlurmRun) -> None:
    member = live.call("scale", "--replicas", "2", "--time", "30", "--parsable").strip()
    live.wait_until(lambda: generates(live, "rollout-2"), "rollout-2 generates", live.patience_s)
    found = groups(live)
    assert found["rollout-2"]["job"] == member and found["rollout-2"]["time_left_s"] < 1800
    scale_to_one(live)
    live.train_steps()
    live.survived("scale out by a replica, and in again")
    assert "rollout-2" not in groups(live) and member not in live.queued()


@in_all
def test_the_head_is_killed_while_it_adds_engines(live: SlurmRun) -> None:
    """The next head continues the operation, and submits no second job. The moments around the
    submission are in tests/cluster/test_elastic.py."""
    member = live.call("scale", "--replicas", "2", "--parsable").strip()
    heads = [process for process in live.supervisors() if "hub" in command_line(process)]
    kill(live, heads)
    live.wait_until(lambda: generates(live, "rollout-2"), "rollout-2 generates", live.patience_s)
    assert groups(live)["rollout-2"]["job"] == member
    scale_to_one(live)
    live.train_steps()
    assert "rollout-2" not in groups(live) and member not in live.queued()


def test_commands_show_what_it_is_at(live: SlurmRun) -> None:
    assert "supervisor: " in live.call("logs", "-n", "2")
    listed = live.call("list")
    assert "running" in listed and groups(live)["rollout"]["job"] in listed


def test_its_processes_can_be_inspected(live: SlurmRun) -> None:
    """Each rank shows its stacks from its own node, and a shell opens beside it."""
    assert_can_be_inspected(live)
    answer = attach_terminal(
        live, "--group", "actor", "--rank", "1", text="tty; echo rank=$RELAX_RANK"
    )
    assert "/dev/pts/" in answer and "rank=1" in answer, answer
    live.wait_until(lambda: live.last_value("resources/actor_processes") == 2, "both ranks", 60)


def test_no_group_restarts_with_slurm(live: SlurmRun) -> None:
    """slurmctld and every slurmd are killed and come again: nobody notices."""
    with live.no_group_restarts("restart of slurmctld and every slurmd"):
        live.restart_slurm()


def test_it_is_stopped_and_comes_to_its_end_with_real_engines(live: SlurmRun) -> None:
    """Submitted again it has the size that rollout was given, and all settings that it is given
    now."""
    live.patience_s = ENGINE_START_S
    live.finish_soon("--rollout.engine.kind=sglang", "--rollout.engine.simulated.response_s=0")
    assert "--nodes=1" in (live.run.submit / "rollout.sbatch").read_text()
    assert set(groups(live)) == {"hub", "rollout", "actor", "actor_fwd"}


@in_all
def test_the_batch_script_of_a_hub_of_one_node_is_killed(sandbox: Sandbox, tmp_path: Path) -> None:
    """There is no standby, and no process of the hub's job survives."""
    with submitted(sandbox, tmp_path, "jobs", {"steps": ENDLESS}) as live:
        live.wait_for_step(2)
        former = live.job("hub")
        with live.only("hub", "kill -9 of the batch script of a hub of one node"):
            kill(live, heads_of(live, "hub"))
        assert live.job("hub") != former and len(live.processes("controller")) == 1


def groups(live: SlurmRun) -> dict[str, dict[str, Any]]:
    """As the command shows them, which asks Slurm too."""
    return json.loads(live.call("status", "--json"))["groups"]


def generates(live: SlurmRun, group: str) -> bool:
    return bool(live.status()["groups"].get(group, {}).get("puts"))
