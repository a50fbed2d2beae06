"""A site that gives the hub no nodes of its own, and lets no compute node call sbatch: it rides
along, and what takes the place of lost jobs was queued at submission.

The engine is `simulated`: a rollout stub in SGLang's place, which env/test.sh --all puts in.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from relax_hpc.cluster.sandbox import Sandbox
from tests.cluster.slurm_runs import ENDLESS, START_S, SlurmRun, submitted
from tests.helpers.run_helpers import rollbacks
from tests.helpers.slurm_sandbox import requires_sandbox
from tests.requirements import requires

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

CLOSED = {
    "steps": ENDLESS,
    "site": {"cpu_nodes": False, "sbatch_on_nodes": False},
    "slurm": {"successors": 1},
    "groups": {"actor": {"spares": 1}},
}


def test_what_was_queued_at_submission_takes_over(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "het", CLOSED) as live:
        _, successor, spare = live.jobs
        live.wait_for_step(2)
        assert live.lease_holder()["node"] in live.nodes_of("rollout")
        a_spare_takes_over(live, spare)
        another_rider_leads(live)
        the_successor_takes_over(live, successor)
        live.stop()


def a_spare_takes_over(live: SlurmRun, spare: str) -> None:
    node = live.nodes_of("actor")[1]
    with live.only("actor", "power loss of a node of the actor, where a held spare job takes over"):
        live.sandbox.kill_node(node, down=True)
    live.sandbox.start_node(node)
    assert live.job("actor") == spare


def another_rider_leads(live: SlurmRun) -> None:
    holder = live.lease_holder()
    with live.only("hub", "kill -9 of a supervisor on a node of rollout"):
        psutil.Process(holder["pid"]).kill()
        live.await_new_supervisor(holder["incarnation"])


def the_successor_takes_over(live: SlurmRun, successor: str) -> None:
    """A group without a spare has lost its only node: the next job goes on, where the actor has a
    component again."""
    (node,), spare, lost = live.nodes_of("actor_fwd"), live.job("actor"), rollbacks(live.run)
    live.sandbox.kill_node(node, down=True)
    live.sandbox.start_node(node)
    live.wait_until(lambda: live.job("hub") == successor, "the successor has started", 2 * START_S)
    live.train_steps()
    live.wait_until(
        lambda: f"{spare} " not in live.queued(), "the job that the actor had is gone", START_S
    )
    assert live.job("actor") != spare and rollbacks(live.run) == lost, "it was to save before"
    live.survived(
        "power loss of a node of actor_fwd, where no spare is left and the successor was queued "
        "before"
    )
