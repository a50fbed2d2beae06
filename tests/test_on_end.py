"""The command that tells people that a run has ended: `site.on_end`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relax_hpc.config import Config
from relax_hpc.lifecycle import on_end
from relax_hpc.lifecycle.on_end import INTERRUPTED, report_end
from relax_hpc.rundir import RunDir, write_json
from relax_hpc.supervise.requests import ask_to_stop

WRITE = "import sys; open(sys.argv[1], 'w').write('|'.join(sys.argv[2:]))"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = Config()
    settings.site.on_end = [sys.executable, "-c", WRITE, str(tmp_path / "report")]
    return settings


@pytest.mark.parametrize(
    ("code", "reason", "state"), [(0, "job 7 was cancelled", "stopped"), (93, "rollout: $(date)", "failed")]
)
def test_a_run_that_was_stopped(
    run_dir: Path, tmp_path: Path, config: Config, code: int, reason: str, state: str
) -> None:
    run = RunDir(run_dir)
    ask_to_stop(run, code, reason)
    report_end(run, config)
    assert (tmp_path / "report").read_text() == f"{state}|{run.root}|{reason}"


def test_a_finished_run(run_dir: Path, tmp_path: Path, config: Config) -> None:
    write_json(RunDir(run_dir).finished, {"steps": 3})
    report_end(RunDir(run_dir), config)
    assert (tmp_path / "report").read_text().startswith("finished|")


def test_a_run_that_another_job_continues_has_not_ended(run_dir: Path, tmp_path: Path, config: Config) -> None:
    report_end(RunDir(run_dir), config)
    assert not (tmp_path / "report").exists()
    report_end(RunDir(run_dir), config, INTERRUPTED)
    assert (tmp_path / "report").read_text().startswith("stopped|")


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
