"""A group that is queued is nobody's fault: the others wait for it, and say so; what Slurm cannot
bear is avoided.

The engine is `simulated`: a rollout stub in SGLang's place, which env/test.sh --all puts in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_hpc.cluster.sandbox import Sandbox
from tests.cluster.slurm_runs import ENDLESS, START_S, submitted
from tests.helpers.run_helpers import ALL
from tests.helpers.slurm_sandbox import busy_but, requires_sandbox
from tests.requirements import requires

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

WAIT_S = 2.0
SMALLER: dict[str, Any] = {
    "steps": ENDLESS,
    "rollout": {"replicas": 1},
    "actor": {"parallel": {"data": 1}},
    "groups": {
        "rollout": {"resources": {"nodes": 1}},
        "actor": {"resources": {"nodes": 1, "options": {"hold": ""}}},
    },
    "queue": {"wait_timeout_s": WAIT_S},
    "liveness": {"max_restarts": 1},
}
"""In four jobs of a node each, the actor's held; whoever waits has less time than anything
takes."""


def test_who_waits_for_a_queued_group_is_not_judged(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "jobs", SMALLER) as live:
        live.wait_until(
            lambda: waits(live.status()).get("actor", 0.0) > 3 * WAIT_S, "the others wait", START_S
        )
        found = json.loads(live.call("status", "--json"))["waits"]
        (wait,) = (one for one in found if one["group"] == "actor")
        assert (
            "is queued (JobHeld" in wait["why"]
            and wait["spent"] > 0
            and 3000.0 < wait["left_s"] < 3600.0
        )
        assert "waits for actor, which is queued (JobHeld" in live.call("status")
        sandbox.client("scontrol", "release", live.job("actor"))
        live.wait_for_step(2)
        assert {
            name: live.incarnations(name) for name in ("hub", "rollout", "actor_fwd")
        } == dict.fromkeys(("hub", "rollout", "actor_fwd"), 1), live.story()
        # The hub is what all others need: who cancels its job wants an end.
        live.cancel()
        marks = [live.mark(group, 1, group) for group in ("rollout", "actor", "actor_fwd")]
        assert {mark["status"] for mark in marks} == {"stopped"}, (
            f"not by themselves: {marks}\n{live.story()}"
        )
        if ALL:
            live.resume(ENDLESS)
            sandbox.client("scontrol", "release", live.job("actor"))
            live.train_steps()
            # Killed before it could say that its job was cancelled: the supervisors of the others
            # ask Slurm about it.
            psutil.Process(live.lease_holder("supervisor-hub")["pid"]).suspend()
            live.cancel()


@pytest.mark.skipif(
    not ALL, reason="a component is cancelled in test_slurm_het.py too; whole: env/test.sh --all"
)
def test_slurmctld_is_spared(sandbox: Sandbox, tmp_path: Path) -> None:
    """Restarted after a component has gone, that of 22.05.8 dies of each further step of the job:
    there is none."""
    with busy_but(sandbox, 7), submitted(sandbox, tmp_path, "het", {"steps": ENDLESS}) as live:
        live.wait_for_step(2)
        with live.only("actor_fwd", "scancel of a component, where no node is to spare"):
            sandbox.client("scancel", live.job("actor_fwd"))
        live.restart_slurm()
        slurmctld, component = sandbox.daemons()["slurmctld"], live.job("rollout")
        with live.only(
            "rollout",
            "kill -9 of a rank of rollout, when a component is gone and slurmctld was restarted",
        ):
            live.kill("rollout", 0)
        assert live.job("rollout") != component and sandbox.daemons()["slurmctld"] == slurmctld
        live.cancel()


def waits(status: dict[str, Any]) -> dict[str, float]:
    """For how long groups have been waited for, seconds."""
    return {wait["group"]: wait["since_s"] for wait in status.get("waits", [])}
