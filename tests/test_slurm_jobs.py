"""One long run with a Slurm job for each group and real SGLang engines, to which everything happens, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_hpc.sandbox import Sandbox
from tests.requirements import requires
from tests.run_helpers import ALL
from tests.slurm_runs import ENDLESS, LEASE_S, START_S, SlurmRun, killing, submitted
from tests.slurm_sandbox import private_sandbox, requires_sandbox

requires("torch", "megatron", "sglang", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm


ONE_ENGINE = {
    "steps": ENDLESS,
    "rollout": {"replicas": 1},
    "groups": {"rollout": {"resources": {"nodes": 1}}, "hub": {"resources": {"nodes": 2}}},
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Its Slurm takes long to miss a node."""
    with private_sandbox(nodes=10, slurmd_timeout=20) as own:
        yield own


def test_jobs_of_real_engines_survive_everything(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "jobs", ONE_ENGINE, "sglang") as live:
        live.wait_for_step(2)
        ranks_die(live)
        if ALL:
            # Else with its node, which takes an engine's start less.
            kill(live, "rollout", "rollout")
        nodes_lose_power(live)
        a_job_is_cancelled_and_comes_back_by_command(live)
        slurm_is_restarted(live)
        live.stop()


def ranks_die(live: SlurmRun) -> None:
    """SIGKILL to a rank of each group; its job starts it again in place."""
    for group, role, rank, moment in (
        ("actor", "actor", 1, "weight publish"),
        ("actor_fwd", "actor_fwd", 0, ""),
        ("hub", "controller", 0, ""),
        ("hub", "advantages", 0, ""),
    ):
        kill(live, group, role, rank, moment)


def kill(live: SlurmRun, group: str, role: str, rank: int = 0, moment: str = "") -> None:
    job = live.job(group)
    with live.only(group, killing(role, moment)):
        live.kill(role, rank, moment)
    assert live.job(group) == job


def nodes_lose_power(live: SlurmRun) -> None:
    """Of each group in turn. Its job's first node takes the supervisor along, and what knows of it first acts.

    Slurm, when it is told, queues the job again, under its number and on other nodes. Else the standby on the hub's
    other node takes over, or the hub has another job take the group; where the supervisor lives, it does that itself.
    """
    job, holder = live.job("hub"), live.lease_holder("supervisor-hub")
    with live.only("hub", "power loss of the leading node of the hub"):
        live.sandbox.kill_node(holder["node"])
        live.supervised_anew(holder["incarnation"], "supervisor-hub")
    assert live.job("hub") == job and live.lease_holder("supervisor-hub")["node"] != holder["node"]
    silent = [holder["node"], lose_node_silently(live, "actor_fwd", 0)]
    if ALL:
        # In the test command the heterogeneous job loses these.
        lose_node(live, "actor", "actor", 0)
        silent += [lose_node_silently(live, "actor", rank) for rank in (1, 0)]
    lose_node(live, "rollout", "rollout", 0)
    for node in silent:
        live.power_on(node)
    lose_node(live, "hub", "advantages", 0)


def lose_node(live: SlurmRun, group: str, role: str, rank: int) -> None:
    job, node = live.job(group), live.nodes_of(role)[rank]
    with live.only(group, f"power loss of a node of {group}"):
        live.sandbox.kill_node(node, down=True)
        live.sandbox.start_node(node)
    assert live.job(group) == job


def lose_node_silently(live: SlurmRun, group: str, rank: int) -> str:
    """The node, which stays away."""
    job, node = live.job(group), live.nodes_of(group)[rank]
    where = "with its supervisor" if rank == 0 else "beside its supervisor's"
    with live.only(group, f"power loss of a node of {group}, {where}, which Slurm is not told of"):
        live.sandbox.kill_node(node)
        live.wait_until(lambda: live.job(group) != job, "another job takes the group", 4 * LEASE_S)
    assert node not in live.nodes_of(group)
    return node


def a_job_is_cancelled_and_comes_back_by_command(live: SlurmRun) -> None:
    """scancel is the user's wish, so nothing comes back by itself."""
    former = live.job("actor_fwd")
    with live.only("actor_fwd", "scancel of the group's component or job"):
        live.sandbox.client("scancel", former)
        live.wait_until(lambda: f"{former} " not in live.queued(), "the cancelled job is gone", START_S)
        live.call("resubmit", "--group", "actor_fwd")
    assert live.job("actor_fwd") != former


def slurm_is_restarted(live: SlurmRun) -> None:
    """slurmctld and every slurmd are killed and come again: nobody notices."""
    with live.nobody_notices("restart of slurmctld and every slurmd"):
        live.restart_slurm()
