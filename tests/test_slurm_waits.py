"""A cluster without a node to spare: groups wait in the queue, jobs end in pieces, users cancel what they have.

The engine is `simulated`: a rollout stub in SGLang's place, which env/test.sh --all puts in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_hpc.errors import EXIT_NO_PROGRESS
from relax_hpc.sandbox import Sandbox
from relax_hpc.supervise.requests import asked_to_stop
from tests.requirements import requires
from tests.run_helpers import ALL, rollbacks
from tests.slurm_runs import ENDLESS, START_S, SlurmRun, submitted
from tests.slurm_sandbox import private_sandbox, requires_sandbox
from tests.test_slurm_ends import hub_nodes, succeeded

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

WAIT_S = 2.0
GIVEN_BACK = "the early signal of the time limit, where a group is in a job of its own and no node is to spare"
LOST = "power loss of a node of the hub, then of actor_fwd's, where no node is to spare"
SMALLER: dict[str, Any] = {
    "steps": ENDLESS,
    "rollout": {"replicas": 1},
    "actor": {"parallel": {"data": 1}},
    "groups": {"rollout": {"resources": {"nodes": 1}}, "actor": {"resources": {"nodes": 1, "options": {"hold": ""}}}},
    "queue": {"wait_timeout_s": WAIT_S},
    "liveness": {"max_restarts": 1},
}
"""In four jobs of a node each, the actor's held; whoever waits has less time than anything takes."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """As many nodes as the largest run here has."""
    with private_sandbox(nodes=7) as own:
        yield own


def test_who_waits_for_a_queued_group_is_not_judged(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "jobs", SMALLER) as live:
        wait = live.wait_until(lambda: waits_for(live, "actor", 3 * WAIT_S), "the others wait", START_S)
        assert "is queued (JobHeld" in wait["why"] and wait["spent"] > 0 and 3000.0 < wait["left_s"] < 3600.0
        assert "waits for actor, which is queued (JobHeld" in live.call("status")
        sandbox.client("scontrol", "release", live.job("actor"))
        live.wait_for_step(2)
        assert {name: live.incarnations(name) for name in ("hub", "rollout", "actor_fwd")} == dict.fromkeys(
            ("hub", "rollout", "actor_fwd"), 1
        ), live.story()
        # The hub is what all others need: who cancels its job wants an end.
        cancelled_means_stopped(live)
        marks = [live.mark(group, 1, group) for group in ("rollout", "actor", "actor_fwd")]
        assert {mark["status"] for mark in marks} == {"stopped"}, f"not by themselves: {marks}\n{live.story()}"
        if ALL:
            live.resume(ENDLESS)
            sandbox.client("scontrol", "release", live.job("actor"))
            live.goes_on()
            # Killed before it could say that its job was cancelled: the supervisors of the others ask Slurm about it.
            psutil.Process(live.lease_holder("supervisor-hub")["pid"]).suspend()
            cancelled_means_stopped(live)


def test_a_group_that_fails_itself_ends_what_is_queued_too(sandbox: Sandbox, tmp_path: Path) -> None:
    # Of roles alone: what looks at their nodes before would find it out.
    crash = "import os, sys\nif '--role' in sys.orig_argv:\n    os._exit(7)\n"
    (tmp_path / "sitecustomize.py").write_text(crash)
    groups = {"rollout": {"env": {"PYTHONPATH": str(tmp_path)}, "resources": {"nodes": 1}}}
    with submitted(sandbox, tmp_path, "jobs", SMALLER | {"groups": SMALLER["groups"] | groups}) as live:
        asked = live.wait_until(lambda: asked_to_stop(live.run), "it gives up", START_S)
        assert asked["code"] == EXIT_NO_PROGRESS and asked["reason"].startswith("rollout: ended 2 times")
        live.assert_nothing_left()
        assert (live.incarnations("rollout"), live.incarnations("actor")) == (2, 0)


def test_a_successor_gets_the_nodes_of_what_slurm_leaves_behind(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "het", {"steps": ENDLESS}) as live:
        live.wait_for_step(2)
        a_group_moves(live, "actor")
        with succeeded(live, GIVEN_BACK):
            live.signal_job(live.job("hub"))
        assert not rollbacks(live.run), "the actor did not save, or had no hub any more to save to"
        node, holder = live.nodes_of("actor_fwd")[0], live.lease_holder()
        lose_and_bring_back(live, holder["node"])
        live.supervised_anew(holder["incarnation"])
        with succeeded(live, LOST):
            # With one node left, component 0 ends when any node is lost; those of two nodes live on.
            lose_and_bring_back(live, node)
        if ALL:
            a_group_moves(live, "actor_fwd")
            with succeeded(live, "power loss of both nodes of the hub, where no node is to spare"):
                # No head is left to give anything back.
                lose_and_bring_back(live, *hub_nodes(live))
            # Killed before it could say that its job was cancelled: its successor asks Slurm about it.
            for head in live.supervisors():
                head.suspend()
        cancelled_means_stopped(live)


@pytest.mark.skipif(not ALL, reason="a component is cancelled in test_slurm_het.py too; whole: env/test.sh --all")
def test_slurmctld_is_spared(sandbox: Sandbox, tmp_path: Path) -> None:
    """Restarted after a component has gone, that of 22.05.8 dies of each further step of the job: there is none."""
    with submitted(sandbox, tmp_path, "het", {"steps": ENDLESS}) as live:
        live.wait_for_step(2)
        with live.only("actor_fwd", "scancel of a component, where no node is to spare"):
            sandbox.client("scancel", live.job("actor_fwd"))
        live.restart_slurm()
        slurmctld, component = sandbox.daemons()["slurmctld"], live.job("rollout")
        with live.only("rollout", "kill -9 of a rank of rollout, when a component is gone and slurmctld was restarted"):
            live.kill("rollout", 0)
        assert live.job("rollout") != component and sandbox.daemons()["slurmctld"] == slurmctld
        cancelled_means_stopped(live)


def lose_and_bring_back(live: SlurmRun, *nodes: str) -> None:
    for node in nodes:
        live.sandbox.kill_node(node, down=True)
    for node in nodes:
        live.sandbox.start_node(node)


def a_group_moves(live: SlurmRun, group: str) -> None:
    """To a job of its own, on the nodes of its component, which is given back."""
    component = live.job(group)
    live.call("resubmit", "--group", group, "--new-job")
    live.goes_on()
    assert live.job(group) != component


def cancelled_means_stopped(live: SlurmRun) -> None:
    """What a user of Slurm expects of scancel: nothing comes after it."""
    job = live.job("hub")
    live.sandbox.client("scancel", job)
    asked = live.wait_until(lambda: asked_to_stop(live.run), "it stops", START_S)
    assert asked == {"code": 0, "reason": f"job {job} was cancelled"}
    live.assert_nothing_left()


def waits_for(live: SlurmRun, group: str, seconds: float) -> dict[str, Any]:
    """What status says of the wait for a group, once that has taken so long."""
    found = {wait["group"]: wait for wait in json.loads(live.call("status", "--json"))["waits"]}
    return found[group] if found.get(group, {"since_s": 0.0})["since_s"] > seconds else {}
