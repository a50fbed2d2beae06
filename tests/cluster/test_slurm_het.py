"""One long run in heterogeneous jobs of the sandbox's Slurm, with one fault after the other.

Each test injects one fault and leaves the run training, so the order of the tests matters. The run
uses the largest staleness in tests (4, with spare groups). The engine is `simulated`, a stub of
SGLang; env/test.sh --all uses SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.cluster.sandbox.processes import alive
from relax_hpc.cluster.slurm.commands import parse_time
from tests.cluster.inspection import assert_can_be_inspected
from tests.cluster.slurm_runs import ENDLESS, LEASE_S, START_S, SlurmRun, kill_fault, submitted
from tests.helpers.run_helpers import ALL, rollbacks, trained_steps
from tests.helpers.slurm_sandbox import busy_but, preempt, requires_sandbox
from tests.requirements import requires

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

STALENESS = 4
NODES = 7
LIMIT_S = 120.0
"""Slurm checks time limits every 30 seconds."""
SAVE_S = 15.0
"""Time that a run needs to save and stop cleanly on a busy machine."""
NONE_TO_SPARE = "no node is to spare"
WHY = (
    "happens to the run of test_slurm_jobs.py too, or here to another group; all of them: "
    "env/test.sh --all"
)
in_all = pytest.mark.skipif(not ALL, reason=WHY)


@pytest.fixture(scope="module")
def run(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRun]:
    """A run on seven nodes, without the last two groups."""
    overrides = {"steps": ENDLESS, "max_staleness": STALENESS, "rollout": {"over_sampling": 0.5}}
    with submitted(sandbox, tmp_path_factory.mktemp("het"), "het", overrides) as live:
        live.wait_for_step(2)
        yield live


@pytest.fixture
def live(run: SlurmRun) -> SlurmRun:
    """The run, unless an earlier test has lost it."""
    assert not run.broken, f"an earlier test has lost the run: {run.broken}"
    return run


@pytest.fixture
def no_node_to_spare(run: SlurmRun) -> Iterator[None]:
    """All nodes except those of the run, or of its successor, are busy."""
    with busy_but(run.sandbox, NODES):
        yield


@pytest.mark.parametrize(
    ("group", "role", "rank", "moment"),
    [
        ("rollout", "rollout", 1, ""),
        ("actor", "actor", 1, "checkpoint"),
        pytest.param("actor_fwd", "actor_fwd", 0, "", marks=in_all),
        pytest.param("hub", "advantages", 0, "", marks=in_all),
        pytest.param("hub", "controller", 0, "", marks=in_all),
        pytest.param("actor", "actor", 0, "weight publish", marks=in_all),
    ],
)
def test_a_group_restarts_after_the_death_of_a_rank(
    live: SlurmRun, group: str, role: str, rank: int, moment: str
) -> None:
    with live.only(group, kill_fault(role, moment)):
        live.kill(role, rank, moment)


@in_all
def test_a_suspended_role_is_replaced_and_killed(live: SlurmRun) -> None:
    (process,) = live.processes("actor_fwd")
    with live.only("actor_fwd", "SIGSTOP of actor_fwd for longer than its lease"):
        process.suspend()
    live.wait_until(lambda: not alive(process), "the former actor_fwd is killed", START_S)


@pytest.mark.parametrize("role", ["actor", pytest.param("rollout", marks=in_all)])
def test_processes_of_a_suspended_node_exit_after_their_replacement(
    live: SlurmRun, role: str
) -> None:
    """All processes of the role on a node are suspended, and slurmstepd too, which could kill them.

    The group has already been replaced when they resume, so the former role must exit on its own.
    """
    incarnation, former = live.newest(role), live.processes(role)[0]
    with live.frozen(live.nodes_of(role)[0]):
        with live.only(
            role, f"SIGSTOP of a whole node of {role}, and SIGCONT when it has been replaced"
        ):
            pass
        # Only the role resumes. slurmstepd is still suspended and cannot kill it.
        former.resume()
        mark = live.wait_until(
            lambda: live.mark(role, incarnation, role), f"the former {role} has ended", START_S
        )
        assert mark["status"] == "failed", mark
        # Its engine is still suspended. It receives a request to end before it is killed.
        live.wait_until(lambda: not alive(former), f"the former {role} is gone", START_S)
    live.assert_trained_once()


def test_the_supervisor_restarts_after_a_kill(live: SlurmRun) -> None:
    """The supervisor restarts on its node."""
    holder = live.lease_holder()
    with live.only("hub", "kill -9 of the supervisor"):
        psutil.Process(holder["pid"]).kill()
        live.await_new_supervisor(holder["incarnation"])


def test_the_standby_takes_over_from_a_suspended_supervisor(live: SlurmRun) -> None:
    """The supervisor of the other node takes over."""
    holder = live.lease_holder()
    former_supervisor = psutil.Process(holder["pid"])
    with live.only("hub", "SIGSTOP of the supervisor for longer than its lease"):
        former_supervisor.suspend()
        live.await_new_supervisor(holder["incarnation"])
    assert live.lease_holder()["node"] != holder["node"]
    live.wait_until(
        lambda: len(live.processes("controller")) == 1, "the former hub has ended", START_S
    )
    live.wait_until(lambda: len(live.processes("advantages")) == 1, "its advantages too", START_S)
    with live.no_group_restarts("SIGCONT of that supervisor when the standby leads"):
        former_supervisor.resume()
        takeover = f"supervisor {holder['incarnation'] + 1} has taken over"
        live.wait_until(
            lambda: takeover in live.log(), "the former supervisor logs the takeover", LEASE_S
        )


@pytest.mark.parametrize(
    ("group", "rank"),
    [pytest.param("rollout", 1, marks=in_all), ("actor", 0), ("actor_fwd", 0)],
)
def test_a_group_moves_to_another_job_after_a_power_loss(
    live: SlurmRun, group: str, rank: int
) -> None:
    """The group continues in a separate job."""
    job, node = live.job(group), live.nodes_of(group)[rank]
    with live.only(group, f"power loss of a node of {group}"):
        # The supervisor detects the loss of the one-node component by missing beats. Slurm sets the
        # other nodes down.
        live.sandbox.kill_node(node, down=group != "actor_fwd")
    live.sandbox.start_node(node, rebooted=True)
    assert live.job(group) != job and node not in live.nodes_of(group)


@in_all
def test_a_group_is_replaced_when_its_separate_job_is_silent(live: SlurmRun) -> None:
    """The group's supervisor is lost with the node, so the run's supervisor must act."""
    job, (node,) = live.job("actor_fwd"), live.nodes_of("actor_fwd")
    with live.only(
        "actor_fwd", "power loss of the node of a job of its own, which Slurm is not told of"
    ):
        live.sandbox.kill_node(node)
    assert live.job("actor_fwd") != job and node not in live.nodes_of("actor_fwd")
    live.sandbox.start_node(node, rebooted=True)


def test_the_run_survives_loss_of_the_leading_node_and_a_cancelled_component(
    live: SlurmRun,
) -> None:
    """The hub is lost with the leading node. The standby on the other node takes over, and the
    other groups continue.

    This test comes after losses of other nodes: if component 0 has only one node left, Slurm 22.05
    ends the whole job at the next loss.
    """
    holder = live.lease_holder()
    with live.only("hub", "power loss of the leading node of the hub"):
        live.sandbox.kill_node(holder["node"])
        live.await_new_supervisor(holder["incarnation"])
    assert live.lease_holder()["node"] != holder["node"]
    with live.only("rollout", "scancel of the group's component or job"):
        live.sandbox.client("scancel", live.job("rollout"))
    live.sandbox.start_node(holder["node"], rebooted=True)


def test_the_report_lists_restarts_and_staleness_is_bounded(live: SlurmRun) -> None:
    assert max(row["staleness/max"] for row in trained_steps(live.run)) <= STALENESS
    report = json.loads(live.call("report", "--json"))
    assert {"hub", "rollout", "actor", "actor_fwd"} == {
        restart["group"] for restart in report["restarts"] if restart["fault"]
    }
    hours = report["hours"]
    assert hours["unit"] == "node" and hours["lost_restarting"] > 0
    assert hours["asked"] == pytest.approx(
        sum(value for name, value in hours.items() if name not in ("unit", "asked"))
    )


@in_all
def test_processes_of_components_can_be_inspected(live: SlurmRun) -> None:
    assert_can_be_inspected(live)


# -- ends of the run's jobs, with a successor ------------------------------------------------------


def test_a_successor_starts_after_the_early_signal(live: SlurmRun, no_node_to_spare: None) -> None:
    before = rollbacks(live.run)
    early = "the early signal of the time limit"
    none = f"{early}, where a group is in a job of its own and {NONE_TO_SPARE}"
    with succeeded(live, f"{early} during a weight publish", none):
        live.signal_job(live.job("hub"), "weight publish")
    assert rollbacks(live.run) == before, "the actor did not save, or the hub had already ended"


def test_a_successor_starts_at_the_time_limit(live: SlurmRun) -> None:
    before, job = rollbacks(live.run), live.job("hub")
    with succeeded(live, "the time limit"):
        # The run has at most a minute left. It must stop and save within this time.
        used_s = parse_time(
            live.sandbox.client("squeue", "--noheader", f"--jobs={job}", "--format=%M").split()[0]
        )
        live.sandbox.client(
            "scontrol", "update", f"jobid={job}", f"timelimit={int((used_s + SAVE_S) / 60) + 1}"
        )
    assert rollbacks(live.run) == before, "steps were lost although there was time to save them"


@in_all
def test_a_successor_starts_after_preemption_of_a_component(live: SlurmRun) -> None:
    """No group restarts in the job that ends."""
    before = rollbacks(live.run)
    started = {group: live.incarnations(group) for group in ("rollout", "actor", "actor_fwd")}
    with succeeded(live, "preemption of the component of actor_fwd"):
        preempt(live.sandbox, live.nodes_of("actor_fwd")[0])
    assert rollbacks(live.run) == before, "steps were lost although there was time to save them"
    assert {
        group: live.incarnations(group) - count for group, count in started.items()
    } == dict.fromkeys(started, 1)


def test_a_successor_starts_after_both_nodes_of_the_hub_lose_power(live: SlurmRun) -> None:
    with succeeded(live, "power loss of both nodes of the hub"):
        live.lose_and_bring_back(*hub_nodes(live))


@in_all
def test_a_successor_starts_after_loss_of_the_hub_without_spare_nodes(
    live: SlurmRun, no_node_to_spare: None
) -> None:
    a_group_moves(live, "actor_fwd")
    with succeeded(live, f"power loss of both nodes of the hub, where {NONE_TO_SPARE}"):
        live.lose_and_bring_back(*hub_nodes(live))


def test_a_successor_starts_after_loss_of_the_hub_node_by_node(
    live: SlurmRun, no_node_to_spare: None
) -> None:
    node, holder = live.nodes_of("actor_fwd")[0], live.lease_holder()
    live.lose_and_bring_back(holder["node"])
    live.await_new_supervisor(holder["incarnation"])
    with succeeded(
        live, f"power loss of a node of the hub, then of actor_fwd's, where {NONE_TO_SPARE}"
    ):
        # Component 0 has one node left, so it ends when any node is lost. Components of two nodes
        # continue.
        live.lose_and_bring_back(node)


def test_a_group_moves_to_a_separate_job(live: SlurmRun, no_node_to_spare: None) -> None:
    a_group_moves(live, "actor")


def test_no_group_restarts_with_slurm(live: SlurmRun) -> None:
    """No process of the run restarts when slurmctld and every slurmd are killed and restarted.

    This test is near the end: Slurm 22.05 fails if the batch host of a job returns after slurmctld
    has read that job from its files.
    """
    with live.no_group_restarts("restart of slurmctld and every slurmd"):
        live.restart_slurm()


def test_a_cancelled_run_leaves_nothing(live: SlurmRun) -> None:
    if ALL:
        # A suspended head cannot report that its job was cancelled. Its successor asks Slurm.
        for head in live.supervisors():
            head.suspend()
    live.cancel()


def a_group_moves(live: SlurmRun, group: str) -> None:
    """Move `group` to a separate job on the nodes of its component, which ends."""
    component = live.job(group)
    live.call("resubmit", "--group", group, "--new-job")
    live.train_steps()
    assert live.job(group) != component


@contextmanager
def succeeded(live: SlurmRun, *faults: str) -> Iterator[None]:
    """Assert that a successor continues all groups and training after the block ends the job."""
    former_job, incarnation = live.job("hub"), live.incarnations("actor")
    yield
    live.wait_until(
        lambda: live.incarnations("actor") > incarnation, "the successor has started", LIMIT_S
    )
    live.train_steps()
    assert live.job("hub") != former_job
    live.wait_until(
        lambda: f"{former_job}+0 " not in live.queued(), "the former job is gone", START_S
    )
    for fault in faults:
        live.survived(fault)


def hub_nodes(live: SlurmRun) -> list[str]:
    """Both nodes of component 0."""
    job = live.job("hub")
    # Waiting jobs have no nodes.
    table = live.sandbox.client("squeue", "--noheader", "--states=RUNNING", "--format=%A %N")
    lines = [line.split() for line in table.splitlines()]
    (nodes,) = [node_names for job_id, node_names in lines if job_id == job]
    return live.sandbox.client("scontrol", "show", "hostnames", nodes).split()
