"""One long run in heterogeneous jobs of the sandbox's Slurm, to which everything happens that can,
one by one.

A test for each, in this order; each leaves the run training. It generates ahead as far as a run may
in tests (staleness 4, with spare groups). The engine is `simulated`: a rollout stub in SGLang's
place, which env/test.sh --all puts in.
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
from tests.cluster.slurm_runs import ENDLESS, LEASE_S, START_S, SlurmRun, killing, submitted
from tests.helpers.run_helpers import ALL, rollbacks, trained_steps
from tests.helpers.slurm_sandbox import busy_but, preempt, requires_sandbox
from tests.requirements import requires

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

STALENESS = 4
NODES = 7
LIMIT_S = 120.0
"""Slurm looks at time limits twice a minute."""
SAVE_S = 15.0
"""What a run needs to make way in good order, however busy the machine is."""
NONE_TO_SPARE = "no node is to spare"
WHY = (
    "happens to the run of test_slurm_jobs.py too, or here to another group; all of them: "
    "env/test.sh --all"
)
in_all = pytest.mark.skipif(not ALL, reason=WHY)


@pytest.fixture(scope="module")
def run(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRun]:
    """On seven nodes, of all groups but the last two."""
    over = {"steps": ENDLESS, "max_staleness": STALENESS, "rollout": {"over_sampling": 0.5}}
    with submitted(sandbox, tmp_path_factory.mktemp("het"), "het", over) as live:
        live.wait_for_step(2)
        yield live


@pytest.fixture
def live(run: SlurmRun) -> SlurmRun:
    """The run, unless an earlier test has lost it."""
    assert not run.broken, f"an earlier test has lost the run: {run.broken}"
    return run


@pytest.fixture
def no_node_to_spare(run: SlurmRun) -> Iterator[None]:
    """The run, or its successor, has all nodes that it needs, and there is none beside them."""
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
def test_a_rank_dies(live: SlurmRun, group: str, role: str, rank: int, moment: str) -> None:
    with live.only(group, killing(role, moment)):
        live.kill(role, rank, moment)


@in_all
def test_a_stopped_role_is_replaced_and_killed(live: SlurmRun) -> None:
    (process,) = live.processes("actor_fwd")
    with live.only("actor_fwd", "SIGSTOP of actor_fwd for longer than its lease"):
        process.suspend()
    live.wait_until(lambda: not alive(process), "the former actor_fwd is killed", START_S)


@pytest.mark.parametrize("role", ["actor", pytest.param("rollout", marks=in_all)])
def test_a_stopped_node_goes_on_too_late(live: SlurmRun, role: str) -> None:
    """All of the role on a node stands still, Slurm's stepd too, which cannot kill it: the group
    has long gone on when it moves again, and ends by itself."""
    incarnation, former = live.newest(role), live.processes(role)[0]
    with live.frozen(live.nodes_of(role)[0]):
        with live.only(
            role, f"SIGSTOP of a whole node of {role}, and SIGCONT when it has been replaced"
        ):
            pass
        # The role alone goes on: nobody is there to kill it.
        former.resume()
        mark = live.wait_until(
            lambda: live.mark(role, incarnation, role), f"the former {role} has ended", START_S
        )
        assert mark["status"] == "failed", mark
        # Its engine still stands still, and is asked to end before it is killed.
        live.wait_until(lambda: not alive(former), f"the former {role} is gone", START_S)
    live.assert_trained_once()


def test_the_supervisor_is_killed(live: SlurmRun) -> None:
    """It comes back on its node."""
    holder = live.lease_holder()
    with live.only("hub", "kill -9 of the supervisor"):
        psutil.Process(holder["pid"]).kill()
        live.supervised_anew(holder["incarnation"])


def test_the_supervisor_stops_for_longer_than_its_lease(live: SlurmRun) -> None:
    """The other node's takes over."""
    holder = live.lease_holder()
    former = psutil.Process(holder["pid"])
    with live.only("hub", "SIGSTOP of the supervisor for longer than its lease"):
        former.suspend()
        live.supervised_anew(holder["incarnation"])
    assert live.lease_holder()["node"] != holder["node"]
    live.wait_until(
        lambda: len(live.processes("controller")) == 1, "the former hub has ended", START_S
    )
    live.wait_until(lambda: len(live.processes("advantages")) == 1, "its advantages too", START_S)
    with live.nobody_notices("SIGCONT of that supervisor when the standby leads"):
        former.resume()
        said = f"supervisor {holder['incarnation'] + 1} has taken over"
        live.wait_until(
            lambda: said in live.log(), "the former supervisor knows that it is none", LEASE_S
        )


@pytest.mark.parametrize(
    ("group", "rank"),
    [pytest.param("rollout", 1, marks=in_all), ("actor", 0), ("actor_fwd", 0)],
)
def test_a_node_loses_power(live: SlurmRun, group: str, rank: int) -> None:
    """The group goes on in a job of its own."""
    job, node = live.job(group), live.nodes_of(group)[rank]
    with live.only(group, f"power loss of a node of {group}"):
        # A component of one node that is lost is noticed by its silence; of the others Slurm hears
        # at once.
        live.sandbox.kill_node(node, down=group != "actor_fwd")
    live.sandbox.start_node(node, rebooted=True)
    assert live.job(group) != job and node not in live.nodes_of(group)


@in_all
def test_a_job_of_its_own_falls_silent(live: SlurmRun) -> None:
    """The group's supervisor goes with the node: the run's sees to it."""
    job, (node,) = live.job("actor_fwd"), live.nodes_of("actor_fwd")
    with live.only(
        "actor_fwd", "power loss of the node of a job of its own, which Slurm is not told of"
    ):
        live.sandbox.kill_node(node)
    assert live.job("actor_fwd") != job and node not in live.nodes_of("actor_fwd")
    live.sandbox.start_node(node, rebooted=True)


def test_the_leading_node_is_lost_and_a_component_cancelled(live: SlurmRun) -> None:
    """With it the hub goes; the standby on the other node takes over, and the groups live on
    meanwhile.

    After the other nodes: once component 0 has a single one, Slurm 22.05 ends the whole job at the
    next loss.
    """
    holder = live.lease_holder()
    with live.only("hub", "power loss of the leading node of the hub"):
        live.sandbox.kill_node(holder["node"])
        live.supervised_anew(holder["incarnation"])
    assert live.lease_holder()["node"] != holder["node"]
    with live.only("rollout", "scancel of the group's component or job"):
        live.sandbox.client("scancel", live.job("rollout"))
    live.sandbox.start_node(holder["node"], rebooted=True)


def test_the_report_tells_of_it_and_staleness_is_bounded(live: SlurmRun) -> None:
    assert max(row["staleness/max"] for row in trained_steps(live.run)) <= STALENESS
    told = json.loads(live.call("report", "--json"))
    assert {"hub", "rollout", "actor", "actor_fwd"} == {
        one["group"] for one in told["restarts"] if one["fault"]
    }
    spent = told["hours"]
    assert spent["unit"] == "node" and spent["lost_restarting"] > 0
    assert spent["asked"] == pytest.approx(
        sum(value for name, value in spent.items() if name not in ("unit", "asked"))
    )


# -- ends of its jobs, with a successor ------------------------------------------------------------


def test_it_makes_way_at_the_early_signal(live: SlurmRun, no_node_to_spare: None) -> None:
    before = rollbacks(live.run)
    early = "the early signal of the time limit"
    none = f"{early}, where a group is in a job of its own and {NONE_TO_SPARE}"
    with succeeded(live, f"{early} during a weight publish", none):
        live.signal_job(live.job("hub"), "weight publish")
    assert rollbacks(live.run) == before, (
        "the actor did not save, or had no hub any more to save to"
    )


def test_it_makes_way_at_the_time_limit(live: SlurmRun) -> None:
    before, job = rollbacks(live.run), live.job("hub")
    with succeeded(live, "the time limit"):
        # The whole run has a minute left, or less, and that is when it is to make way.
        used_s = parse_time(
            live.sandbox.client("squeue", "--noheader", f"--jobs={job}", "--format=%M").split()[0]
        )
        live.sandbox.client(
            "scontrol", "update", f"jobid={job}", f"timelimit={int((used_s + SAVE_S) / 60) + 1}"
        )
    assert rollbacks(live.run) == before, "steps were lost although there was time to save them"


@in_all
def test_a_component_is_preempted(live: SlurmRun) -> None:
    """No group is started again in the job that ends."""
    before = rollbacks(live.run)
    started = {group: live.incarnations(group) for group in ("rollout", "actor", "actor_fwd")}
    with succeeded(live, "preemption of the component of actor_fwd"):
        preempt(live.sandbox, live.nodes_of("actor_fwd")[0])
    assert rollbacks(live.run) == before, "steps were lost although there was time to save them"
    assert {
        group: live.incarnations(group) - count for group, count in started.items()
    } == dict.fromkeys(started, 1)


def test_both_nodes_of_the_hub_lose_power(live: SlurmRun) -> None:
    with succeeded(live, "power loss of both nodes of the hub"):
        live.lose_and_bring_back(*hub_nodes(live))


@in_all
def test_both_nodes_of_the_hub_lose_power_and_no_head_gives_back_others(
    live: SlurmRun, no_node_to_spare: None
) -> None:
    a_group_moves(live, "actor_fwd")
    with succeeded(live, f"power loss of both nodes of the hub, where {NONE_TO_SPARE}"):
        live.lose_and_bring_back(*hub_nodes(live))


def test_the_hub_is_lost_node_by_node(live: SlurmRun, no_node_to_spare: None) -> None:
    node, holder = live.nodes_of("actor_fwd")[0], live.lease_holder()
    live.lose_and_bring_back(holder["node"])
    live.supervised_anew(holder["incarnation"])
    with succeeded(
        live, f"power loss of a node of the hub, then of actor_fwd's, where {NONE_TO_SPARE}"
    ):
        # With one node left, component 0 ends when any node is lost; those of two nodes live on.
        live.lose_and_bring_back(node)


def test_a_group_moves(live: SlurmRun, no_node_to_spare: None) -> None:
    a_group_moves(live, "actor")


def test_slurm_is_restarted(live: SlurmRun) -> None:
    """slurmctld and every slurmd are killed and come again: nobody notices.

    Near the end: Slurm 22.05 breaks when the batch host of a job comes back that slurmctld has read
    from its files.
    """
    with live.nobody_notices("restart of slurmctld and every slurmd"):
        live.restart_slurm()


def test_it_is_cancelled_and_nothing_is_left(live: SlurmRun) -> None:
    if ALL:
        # Killed before it could say that its job was cancelled: its successor asks Slurm about it.
        for head in live.supervisors():
            head.suspend()
    live.cancel()


def a_group_moves(live: SlurmRun, group: str) -> None:
    """To a job of its own, on the nodes of its component, which is given back."""
    component = live.job(group)
    live.call("resubmit", "--group", group, "--new-job")
    live.goes_on()
    assert live.job(group) != component


@contextmanager
def succeeded(live: SlurmRun, *faults: str) -> Iterator[None]:
    """In the block the job of the run ends; the next one goes on with every group, and training
    with every step."""
    former, incarnation = live.job("hub"), live.incarnations("actor")
    yield
    live.wait_until(
        lambda: live.incarnations("actor") > incarnation, "the successor has started", LIMIT_S
    )
    live.goes_on()
    assert live.job("hub") != former
    live.wait_until(lambda: f"{former}+0 " not in live.queued(), "the former job is gone", START_S)
    for fault in faults:
        live.survived(fault)


def hub_nodes(live: SlurmRun) -> list[str]:
    """Both nodes of component 0."""
    job = live.job("hub")
    lines = [
        line.split()
        for line in live.sandbox.client("squeue", "--noheader", "--format=%A %N").splitlines()
    ]
    (nodes,) = [words[1] for words in lines if words[0] == job]
    return live.sandbox.client("scontrol", "show", "hostnames", nodes).split()
