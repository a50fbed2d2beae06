"""Ends of runs as status and list show them, by files, processes and squeue."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_RETRY
from relax_hpc.base.rundir import write_json
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.supervise import requests
from relax_hpc.commands.program import main
from relax_hpc.config import load_resolved
from relax_hpc.config.groups import group_roles
from relax_hpc.net.rendezvous import life_signs
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.life_signs import process_identity
from relax_hpc.ops.observe import listing
from relax_hpc.ops.observe.status import status
from tests.helpers.command_helpers import (  # noqa: F401
    GROUPS,
    begin,
    make_run,
    short_waits,
    slurm_fixture,
    submitted,
)
from tests.helpers.fake_slurm import FakeSlurm


@pytest.mark.parametrize(
    ("stop", "state", "code"),
    [
        ((0, "asked to stop"), "stopped", 130),
        ((78, "lr"), "failed", 78),
        ((75, "disk"), "failed", 75),
        ((), "ended", 75),
    ],
)
@pytest.mark.parametrize("sign_of_end", ["marks", "gone"])
def test_the_end_of_a_run_is_known_at_once(
    tmp_path: Path,
    slurm: FakeSlurm,
    capsys: Any,
    stop: tuple,
    state: str,
    code: int,
    sign_of_end: str,
) -> None:
    """By what its roles have said, or because their processes are not there any more: their beats
    are young."""
    run = make_run(tmp_path / "runs" / "a", "local")
    assert main(["status", str(run.root)]) == EXIT_RETRY
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        sign = process_identity() | {"pid": process.pid, "born": life_signs._born(process.pid)}
        for name in GROUPS:
            incarnation = begin(run, name)
            beat = run.rendezvous(name) / f"beat-{name}.json"
            write_json(beat, json.loads(beat.read_text()) | sign)
        assert status(run, 0.05)["state"] == "running" == listing.runs(tmp_path)[0]["state"]
        assert main(["status", str(run.root)]) == main(["list", str(tmp_path)]) == 0
        for name in GROUPS if sign_of_end == "marks" else ():
            for role in group_roles(load_resolved(run.root), name):
                write_exit_mark(
                    run.exit_mark(name, incarnation, role), 75, "ended by its supervisor"
                )
        process.kill() if sign_of_end == "gone" else None
    if stop:
        requests.request_stop(run, *stop)
    run_status = status(run, 0.05)
    assert (run_status["state"], run_status["exit_code"]) == (state, code)
    assert {group["state"] for group in run_status["groups"].values()} == {"ended"}
    capsys.readouterr()
    assert main(["status", str(run.root)]) == main(["list", str(tmp_path), "--json"]) == code
    assert f'"state": "{state}", "exit_code": {code}' in capsys.readouterr().out


def test_a_run_whose_jobs_squeue_does_not_know_has_ended(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path / "runs" / "a")
    submitted(run, slurm)
    assert (
        listing.runs(tmp_path)[0]["state"]
        == status(run, 0.05, Slurm(30.0, 1))["state"]
        == "running"
    )
    slurm.set(jobs={})
    assert (
        listing.runs(tmp_path)[0]["state"] == status(run, 0.05, Slurm(30.0, 1))["state"] == "ended"
    )
    slurm.answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert listing.runs(tmp_path)[0]["state"] == "running", "only its beats are a sign"
