"""One long run in one heterogeneous job of the sandbox's Slurm, to which everything happens that can, one by one.

The engine is `simulated`: a rollout stub in SGLang's place, which env/test.sh --all puts in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from relax_hpc.sandbox import Sandbox
from tests.requirements import requires
from tests.run_helpers import ALL
from tests.slurm_runs import ENDLESS, LEASE_S, START_S, SlurmRun, killing, submitted
from tests.slurm_sandbox import requires_sandbox

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm


def test_a_heterogeneous_job_survives_everything(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "het", {"steps": ENDLESS}) as live:
        live.wait_for_step(2)
        ranks_die(live)
        processes_stop_for_longer_than_their_lease(live)
        supervisors_end(live)
        nodes_lose_power(live)
        if ALL:
            a_job_falls_silent(live)
        # After the other nodes: once component 0 has a single one, Slurm 22.05 ends the whole job at the next loss.
        with the_leading_node_lost(live):
            a_component_is_cancelled(live)
        # Last: Slurm 22.05 breaks when the batch host of a job comes back that slurmctld has read from its files.
        slurm_is_restarted(live)
        live.stop()


def ranks_die(live: SlurmRun) -> None:
    """SIGKILL to a rank of each group, the actor's in the middle of a weight publish and of a checkpoint."""
    also_in_jobs = (
        ("actor_fwd", "actor_fwd", 0, ""),
        ("hub", "advantages", 0, ""),
        ("hub", "controller", 0, ""),
        ("actor", "actor", 0, "weight publish"),
    )
    for group, role, rank, moment in (
        ("rollout", "rollout", 1, ""),
        ("actor", "actor", 1, "checkpoint"),
        *(also_in_jobs if ALL else ()),
    ):
        with live.only(group, killing(role, moment)):
            live.kill(role, rank, moment)


def processes_stop_for_longer_than_their_lease(live: SlurmRun) -> None:
    """A stopped role is replaced and killed; where Slurm cannot kill it either, it ends by itself when it goes on."""
    if ALL:
        (process,) = live.processes("actor_fwd")
        with live.only("actor_fwd", "SIGSTOP of actor_fwd for longer than its lease"):
            process.suspend()
        psutil.wait_procs([process], timeout=10.0)
        assert not process.is_running()
        a_stopped_node_goes_on_too_late(live, "rollout")
    a_stopped_node_goes_on_too_late(live, "actor")


def a_stopped_node_goes_on_too_late(live: SlurmRun, role: str) -> None:
    """All of the role on a node stands still, Slurm's stepd too; the group has long gone on when it moves again."""
    incarnation, former = live.incarnations(role), live.processes(role)[0]
    with live.frozen(live.nodes_of(role)[0]):
        with live.only(role, f"SIGSTOP of a whole node of {role}, and SIGCONT when it has been replaced"):
            pass
        # The role alone goes on: nobody is there to kill it.
        former.resume()
        mark = live.wait_until(lambda: live.mark(role, incarnation, role), f"the former {role} has ended", START_S)
        assert mark["status"] == "failed", mark
        psutil.wait_procs([former], timeout=10.0)
    live.assert_trained_once()


def supervisors_end(live: SlurmRun) -> None:
    """Killed, it comes back on its node; stopped for longer than its lease, the other node's takes over."""
    holder = live.lease_holder()
    with live.only("hub", "kill -9 of the supervisor"):
        psutil.Process(holder["pid"]).kill()
        live.supervised_anew(holder["incarnation"])
    holder = live.lease_holder()
    former = psutil.Process(holder["pid"])
    with live.only("hub", "SIGSTOP of the supervisor for longer than its lease"):
        former.suspend()
        live.supervised_anew(holder["incarnation"])
    assert live.lease_holder()["node"] != holder["node"]
    live.wait_until(lambda: len(live.processes("controller")) == 1, "the former hub has ended", START_S)
    live.wait_until(lambda: len(live.processes("advantages")) == 1, "its advantages too", START_S)
    with live.nobody_notices("SIGCONT of that supervisor when the standby leads"):
        former.resume()
        said = f"supervisor {holder['incarnation'] + 1} has taken over"
        live.wait_until(lambda: said in live.log(), "the former supervisor knows that it is none", LEASE_S)


def nodes_lose_power(live: SlurmRun) -> None:
    """Of each group in turn: it goes on in a job of its own."""
    for group, rank in (("rollout", 1), ("actor", 0), ("actor_fwd", 0)):
        job, node = live.job(group), live.nodes_of(group)[rank]
        with live.only(group, f"power loss of a node of {group}"):
            # A component of one node that is lost is noticed by its silence; of the others Slurm hears at once.
            live.sandbox.kill_node(node, down=group != "actor_fwd")
        live.sandbox.start_node(node)
        assert live.job(group) != job and node not in live.nodes_of(group)


def a_job_falls_silent(live: SlurmRun) -> None:
    """The group is in a job of its own by now, and its supervisor goes with the node: the run's sees to it."""
    job, (node,) = live.job("actor_fwd"), live.nodes_of("actor_fwd")
    with live.only("actor_fwd", "power loss of the node of a job of its own, which Slurm is not told of"):
        live.sandbox.kill_node(node)
    assert live.job("actor_fwd") != job and node not in live.nodes_of("actor_fwd")
    live.power_on(node)


def a_component_is_cancelled(live: SlurmRun) -> None:
    with live.only("rollout", "scancel of the group's component or job"):
        live.sandbox.client("scancel", live.job("rollout"))


def slurm_is_restarted(live: SlurmRun) -> None:
    """slurmctld and every slurmd are killed and come again: nobody notices."""
    with live.nobody_notices("restart of slurmctld and every slurmd"):
        live.restart_slurm()


@contextmanager
def the_leading_node_lost(live: SlurmRun) -> Iterator[None]:
    """With it the hub goes; the standby on the other node takes over, and the groups live on meanwhile.

    It comes back after the block, when Slurm knows that it was gone: else what it ran may stay COMPLETING.
    """
    holder = live.lease_holder()
    with live.only("hub", "power loss of the leading node of the hub"):
        live.sandbox.kill_node(holder["node"])
        live.supervised_anew(holder["incarnation"])
    assert live.lease_holder()["node"] != holder["node"]
    yield
    live.power_on(holder["node"])
