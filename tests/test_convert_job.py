"""Conversions as jobs: by submitit as processes of this machine, and on a real Slurm."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from relax_hpc.cli.program import main
from relax_hpc.convert.conversion import Request
from relax_hpc.convert.job import ConversionJob, JobOptions, submit
from relax_hpc.errors import ConfigError
from relax_hpc.sandbox import Sandbox
from tests.convert_helpers import DENSE, content, model, to

pytest.importorskip("submitit")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs start from another directory, with this checkout."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))


def test_a_job_converts_and_its_files_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = model(tmp_path / "hf", DENSE)
    to(source, tmp_path / "expected")
    monkeypatch.chdir(tmp_path)
    request = Request(source=Path("hf"), target=Path("megatron"), verify="digests")
    answer = submit(request, JobOptions(wait=True), cluster="local")
    assert answer["report"]["tensors"] == 25
    assert "part 1 of 1" in Path(answer["log"]).read_text()
    assert content(tmp_path / "megatron/huggingface") == content(tmp_path / "expected/huggingface")
    assert (tmp_path / ".megatron.jobs").stat().st_mode & 0o777 == 0o700


def test_an_error_in_a_job_is_the_commands_error(tmp_path: Path):
    source = model(tmp_path / "hf", DENSE)
    (source / "model.safetensors").write_bytes(b"")
    answer = ConversionJob({"source": source, "target": tmp_path / "megatron"})()
    assert answer["exit_code"] == 78 and "model.safetensors: not a whole" in answer["error"]


def test_a_job_that_is_preempted_is_submitted_again_as_it_is(tmp_path: Path):
    job = ConversionJob({"source": tmp_path, "target": tmp_path})
    assert job.checkpoint().function is job


def test_without_submitit_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setitem(sys.modules, "submitit", None)
    source = model(tmp_path / "hf", DENSE)
    assert main(["convert", str(source), str(tmp_path / "megatron"), "--slurm"]) == 78
    assert "pip install 'relax_hpc[slurm]'" in capsys.readouterr().err


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--slurm: .*srun"):
        submit(Request(source=tmp_path, target=tmp_path / "t"), JobOptions(), cluster="slurm")


def test_slurm_runs_it(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    source = model(tmp_path / "hf", DENSE)
    # submitit 1.5 asks for USR2 90 s before the limit, and Slurm may send it a minute early: a process that has not
    # installed its handler by then dies.
    words = ["convert", str(source), str(tmp_path / "megatron"), "--slurm", "--wait", "--json", "--time", "30"]
    assert main([*words, "--cpus", "1", "--verify", "digests"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 25
    (source / "model.safetensors").write_bytes(b"")
    words[2] = str(tmp_path / "other")
    assert main(words) == 78
    assert "model.safetensors: not a whole" in capsys.readouterr().err
