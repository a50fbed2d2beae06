"""The command that tells people that a run has ended: `site.on_end`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise.requests import request_stop
from relax_hpc.commands import head, on_end
from relax_hpc.commands.head import Head
from relax_hpc.commands.on_end import INTERRUPTED, report_end, report_local_end
from relax_hpc.config import Config

WRITE = "import sys; open(sys.argv[1], 'w').write('|'.join(sys.argv[2:]))"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = Config()
    settings.site.on_end = [sys.executable, "-c", WRITE, str(tmp_path / "report")]
    return settings


@pytest.mark.parametrize(
    ("code", "reason", "state"),
    [(0, "job 7 was cancelled", "stopped"), (93, "rollout: $(date)", "failed")],
)
def test_a_run_that_was_stopped(
    run_dir: Path, tmp_path: Path, config: Config, code: int, reason: str, state: str
) -> None:
    run = RunDir(run_dir)
    request_stop(run, code, reason)
    report_end(run, config)
    assert (tmp_path / "report").read_text() == f"{state}|{run.root}|{reason}"


def test_a_finished_run(run_dir: Path, tmp_path: Path, config: Config) -> None:
    write_json(RunDir(run_dir).finished, {"steps": 3})
    report_end(RunDir(run_dir), config)
    assert (tmp_path / "report").read_text().startswith("finished|")


def test_a_run_that_another_job_continues_has_not_ended(
    run_dir: Path, tmp_path: Path, config: Config
) -> None:
    report_end(RunDir(run_dir), config)
    assert not (tmp_path / "report").exists()
    report_end(RunDir(run_dir), config, INTERRUPTED)
    assert (tmp_path / "report").read_text().startswith("stopped|")


def test_a_local_run_that_an_error_ends_has_failed(
    run_dir: Path, tmp_path: Path, config: Config
) -> None:
    run = RunDir(run_dir)
    with pytest.raises(ConfigError), report_local_end(run, config):
        raise ConfigError("model.path: found '/nowhere'")
    assert (tmp_path / "report").read_text() == f"failed|{run.root}|model.path: found '/nowhere'"
    with report_local_end(run, config):
        pass
    assert (tmp_path / "report").read_text().startswith("stopped|")


@pytest.mark.parametrize(
    ("group", "error", "reported"),
    [
        ("hub", ConfigError("no such model"), ["failed", "no such model"]),
        ("hub", RelaxError("a node was lost"), []),
        ("actor", ConfigError("no such model"), []),
    ],
)
def test_a_run_on_slurm_ends_with_an_error_that_no_other_job_can_avoid(
    run_dir: Path,
    tmp_path: Path,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    error: RelaxError,
    reported: list[str],
) -> None:
    def supervise(*_: object) -> int:
        raise error

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(Head, "_supervise", supervise)
    monkeypatch.setattr(
        head, "GroupJob", lambda *_: SimpleNamespace(attempt=1, end=lambda code: None)
    )
    config.layout = "jobs"
    lease: Any = SimpleNamespace(release=lambda: None)
    (run_dir / "rendezvous" / f"supervisor-{group}").mkdir(parents=True, exist_ok=True)
    assert Head(RunDir(run_dir), config, group).lead(lease) == error.exit_code
    report = tmp_path / "report"
    assert (report.read_text().split("|")[::2] if report.exists() else []) == reported


def test_a_run_whose_job_was_cancelled_is_reported_by_the_successor(
    run_dir: Path, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(run_dir)
    Ledger(run).add(Submission("6", "group", "hub"))
    Ledger(run).add(Submission("7", "successor", "hub", after="6"))

    def heed(*_: object) -> bool:
        request_stop(run, 0, "job 6 was cancelled")
        return True

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(head, "stop_if_user_cancelled", heed)
    monkeypatch.setattr(
        head, "GroupJob", lambda *_: SimpleNamespace(attempt=1, end=lambda code: None)
    )
    config.layout = "jobs"
    lease: Any = SimpleNamespace()
    assert Head(run, config, "hub").lead(lease) == 0
    assert (tmp_path / "report").read_text() == f"stopped|{run.root}|job 6 was cancelled"


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (["/no/such/command"], "No such file or directory"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "exit code 3"),
        ([sys.executable, "-c", "import time; time.sleep(9)"], "ended after 0.3 s"),
        ([sys.executable, "\0"], "embedded null byte"),
    ],
)
def test_a_command_that_fails_changes_nothing(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: list[str],
    text: str,
) -> None:
    """Its arguments, which may hold a token, are not printed."""
    monkeypatch.setattr(on_end, "_LONGEST_S", 0.3 if "time" in program[-1] else 30.0)
    config = Config()
    config.site.on_end = [*program, "--token=secret"]
    report_end(RunDir(run_dir), config, INTERRUPTED)
    assert capsys.readouterr().err == f"site.on_end: {program[0]}: {text}\n"
