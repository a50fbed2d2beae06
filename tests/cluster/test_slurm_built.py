"""Whole runs on a Slurm that was built from source, with deaths, lost components and requeues.

    RELAX_SLURM_PREFIX=/opt/slurm-25.11 ./env/test.sh --all tests/cluster/test_slurm_built.py

The variable also selects that Slurm for all other tests on a real Slurm. If it names no Slurm, they
fail.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.cluster.slurm.expedited_requeue import SINCE
from tests.cluster.slurm_runs import START_S, submitted
from tests.effort import effort
from tests.helpers.slurm_sandbox import PREFIX_VARIABLE, private_sandbox, requires_sandbox
from tests.requirements import requires

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

PREFIX = os.environ.get(PREFIX_VARIABLE, "")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        not (PREFIX and effort(0, 1)), reason=f"needs a built Slurm in {PREFIX_VARIABLE}, and --all"
    ),
]
SMALL_RUN: dict[str, Any] = {"steps": 400}


def test_the_sandbox_runs_the_slurm_of_the_prefix(sandbox: Sandbox) -> None:
    assert sandbox.installation.prefix == str(Path(PREFIX).resolve())
    assert sandbox.installation.version() in sandbox.client("sinfo", "--version")
    assert sandbox.is_up()


@pytest.mark.parametrize("layout", ["het", "jobs"])
def test_a_run_survives_deaths(sandbox: Sandbox, tmp_path: Path, layout: str) -> None:
    with submitted(sandbox, tmp_path, layout, SMALL_RUN) as live:
        live.wait_for_step(2)
        with live.only("actor", f"SIGKILL of a rank of the actor ({layout}, built Slurm)"):
            live.kill("actor", 1)
        if layout == "het":
            with live.only("rollout", "scancel of the group's component (built Slurm)"):
                sandbox.client("scancel", live.job("rollout"))
        else:
            with live.only("rollout", "scontrol requeue of the group's job (built Slurm)"):
                sandbox.client("scontrol", "requeue", live.job("rollout"))
        live.finish_soon()


def test_an_expedited_requeue_starts_at_once(tmp_path: Path) -> None:
    """A requeued job of Slurm 25.11 starts before its credentials have expired, and a failed batch
    script is not held."""
    extra = ("SlurmctldParameters=enable_expedited_requeue",)
    with private_sandbox(nodes=7, cred_expire=600, extra=extra) as sandbox:
        if sandbox.installation.release() < SINCE:
            return
        with submitted(sandbox, tmp_path, "jobs", SMALL_RUN) as live:
            live.wait_for_step(2)
            job = live.job("rollout")
            assert "ExpeditedRequeue=Yes" in sandbox.client("scontrol", "show", "job", job)
            with live.only("rollout", "expedited requeue of the group's job"):
                sandbox.client("scontrol", "requeue", job)
            live.wait_until(lambda: live.job("rollout") == job, "the same job has it", START_S)
            hub = live.job("hub")
            live.kill("hub_head")
            live.wait_until(lambda: live.job("hub") != hub, "a successor has the hub", START_S)
            live.finish_soon()
