"""Expedited requeue in layout `jobs`: where it is requested, and when Slurm may requeue a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.expedited_requeue import allow_requeue, forbid_requeue, is_enabled
from relax_hpc.cluster.slurm.render import render
from relax_hpc.commands import head
from relax_hpc.config import Config, dump, load
from tests.helpers.fake_slurm import FakeSlurm

ROOT = Path(__file__).parents[2]
GUARD = 'scontrol update "jobid=$SLURM_JOB_ID" requeue=0 || true'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


def jobs_config(run_dir: Path, requeue: str | None) -> Config:
    config = load(
        [str(ROOT / "configs/runs/quickstart.yaml")], {"layout": "jobs", "run_dir": str(run_dir)}
    )
    if requeue is not None:
        config.site.options["requeue"] = requeue
    return config


def updates(slurm: FakeSlurm) -> list[str]:
    """Changes that were requested of job 8."""
    calls = [call["argv"] for call in slurm.calls("scontrol")]
    return [argv[-1] for argv in calls if argv[:2] == ["update", "jobid=8"]]


@pytest.mark.parametrize(
    ("version", "parameters", "enabled"),
    [
        ("25.11.0", "enable_expedited_requeue", True),
        ("26.05.2", "idle_on_node_suspend,enable_expedited_requeue", True),
        ("24.11.5", "enable_expedited_requeue", False),
        ("25.11.0", "(null)", False),
        ("", "enable_expedited_requeue", False),
    ],
)
def test_the_cluster_decides(version: str, parameters: str, enabled: bool) -> None:
    config = {"SLURM_VERSION": version, "SlurmctldParameters": parameters}
    assert is_enabled(config) == enabled


@pytest.mark.parametrize(("requeue", "guarded"), [("expedite", True), ("", False), (None, False)])
def test_a_script_with_it_begins_with_a_guard(
    tmp_path: Path, requeue: str | None, guarded: bool
) -> None:
    """If the script fails before its supervisor runs, Slurm 25.11 would hold the job for ever."""
    for text in render(jobs_config(tmp_path / "run", requeue)).values():
        commands = [line for line in text.splitlines() if line and line[0] != "#"]
        assert (commands[0] == GUARD) == (GUARD in text) == guarded
        assert ("#SBATCH --requeue=expedite" in text) == guarded


@pytest.mark.parametrize(
    ("state", "requeue", "expected"),
    [
        ("RUNNING", "expedite", ["requeue=1", "requeue=0"]),
        ("COMPLETING", "expedite", []),
        ("RUNNING", None, []),
    ],
)
def test_only_a_running_job_with_it_is_changed(
    tmp_path: Path, slurm: FakeSlurm, state: str, requeue: str | None, expected: list[str]
) -> None:
    slurm.answer("scontrol", f"JobId=8 JobState={state} ExpeditedRequeue=Yes\n", match="show job")
    slurm.answer("scontrol", match="update")
    config = jobs_config(tmp_path / "run", requeue)
    allow_requeue(config, "actor", Slurm(tries=1))
    forbid_requeue(config, "actor", Slurm(tries=1))
    assert updates(slurm) == expected


def test_no_answer_of_slurm_changes_nothing(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.answer("scontrol", err="Unable to contact slurm controller", code=1)
    allow_requeue(jobs_config(tmp_path / "run", "expedite"), "actor", Slurm(tries=1))
    assert updates(slurm) == []


@pytest.mark.parametrize(
    ("code", "expected"), [(EXIT_DONE, []), (EXIT_RETRY, ["requeue=0"]), (78, ["requeue=0"])]
)
def test_a_head_that_fails_forbids_it(
    tmp_path: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    expected: list[str],
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    dump(jobs_config(run.root, "expedite"), run.config)
    slurm.answer("scontrol", "JobId=8 JobState=RUNNING\n", match="show job")
    slurm.answer("scontrol", match="update")
    monkeypatch.setattr(head, "run_watched", lambda *_: code)
    assert head.main(["--run_dir", str(run.root), "--group", "actor"]) == code
    assert updates(slurm) == expected
    assert head.main(["--run_dir", str(run.root), "--group", "hub", "--standby"]) == code
    assert updates(slurm) == expected, "a standby is not the batch script"
