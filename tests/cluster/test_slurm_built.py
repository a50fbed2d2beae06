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
from relax_hpc.cluster.sandbox.processes import until
from relax_hpc.cluster.slurm.expedited_requeue import SINCE
from tests.cluster.slurm_runs import ENDLESS, submitted
from tests.cluster.test_slurm_jobs import heads_of, kill
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
ENDLESS_RUN: dict[str, Any] = {"steps": ENDLESS}


def test_the_sandbox_runs_the_slurm_of_the_prefix(sandbox: Sandbox) -> None:
    assert sandbox.installation.prefix == str(Path(PREFIX).resolve())
    assert sandbox.installation.version() in sandbox.client("sinfo", "--version")
    assert sandbox.is_up()


@pytest.mark.parametrize("layout", ["het", "jobs"])
def test_a_run_survives_deaths(sandbox: Sandbox, tmp_path: Path, layout: str) -> None:
    with submitted(sandbox, tmp_path, layout, ENDLESS_RUN) as live:
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
    """A requeued job of Slurm 25.11 starts before its credentials have expired. A killed batch
    script is not held, so that the successor of the hub starts."""
    extra = ("SlurmctldParameters=enable_expedited_requeue",)
    with private_sandbox(nodes=7, cred_expire=600, extra=extra) as sandbox:
        has_it = sandbox.installation.release() >= SINCE
        with submitted(sandbox, tmp_path, "jobs", ENDLESS_RUN) as live:
            live.wait_for_step(2)
            job, hub = live.job("rollout"), live.job("hub")
            fields = sandbox.client("scontrol", "--oneliner", "show", "job", job).split()
            assert ("ExpeditedRequeue=Yes" in fields) == has_it and "Requeue=1" in fields
            if has_it:
                with live.only("rollout", "expedited requeue of the group's job"):
                    sandbox.client("scontrol", "requeue", job)
                assert live.job("rollout") == job
            with live.only("hub", "kill -9 of the batch script of the hub's job (built Slurm)"):
                kill(live, heads_of(live, "hub"))
            assert live.job("hub") != hub


def test_a_failed_script_is_not_held(tmp_path: Path) -> None:
    """With the guard of the template, a job ends although its requeue is an expedited one."""
    extra = ("SlurmctldParameters=enable_expedited_requeue",)
    guard = 'scontrol update "jobid=$SLURM_JOB_ID" requeue=0 || true'
    with private_sandbox(nodes=1, extra=extra) as sandbox:
        value = ["--requeue=expedite"] if sandbox.installation.release() >= SINCE else ["--requeue"]
        script = tmp_path / "job.sh"
        states = {}
        for name, lines in {"guarded": guard, "bare": "true"}.items():
            script.write_text(f"#!/bin/bash\n{lines}\nexit 3\n")
            submit = ("sbatch", "--parsable", f"--chdir={tmp_path}", *value, str(script))
            states[name] = _final_state(sandbox, sandbox.client(*submit).strip())
        held = "REQUEUE_HOLD" if value == ["--requeue=expedite"] else "FAILED"
        assert states == {"guarded": "FAILED", "bare": held}


def _final_state(sandbox: Sandbox, job: str) -> str:
    def state() -> str:
        command = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
        return sandbox.client(*command).strip()

    until(lambda: state() in ("FAILED", "REQUEUE_HOLD"), 60.0, f"job {job} does not end")
    return state()
