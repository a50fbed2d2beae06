"""Conversions as jobs: by submitit as processes of this machine, and on a real Slurm."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.commands.program import main
from relax_hpc.convert import job as conversion_job
from relax_hpc.convert.conversion import ConversionRequest
from relax_hpc.convert.job import ConversionJob, JobOptions, submit
from tests.helpers.convert_helpers import DENSE, content, model, to
from tests.helpers.fake_slurm import FakeSlurm

pytest.importorskip("submitit")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs start from another directory, with this checkout."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    )


def test_a_job_converts_and_its_files_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = model(tmp_path / "hf", DENSE)
    to(source, tmp_path / "expected")
    monkeypatch.chdir(tmp_path)
    request = ConversionRequest(source=Path("hf"), target=Path("megatron"), verify="digests")
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


def test_without_submitit_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setitem(sys.modules, "submitit", None)
    source = model(tmp_path / "hf", DENSE)
    assert main(["convert", str(source), str(tmp_path / "megatron"), "--slurm"]) == 78
    assert "pip install 'relax_hpc[slurm]'" in capsys.readouterr().err


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--slurm: .*srun"):
        submit(
            ConversionRequest(source=tmp_path, target=tmp_path / "t"), JobOptions(), cluster="slurm"
        )


@pytest.fixture
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_POLL_S": 0.02, "_QUERY_S": 0.1, "_RESULT_TIMEOUT_S": 1.0}.items():
        monkeypatch.setattr(conversion_job, name, seconds)


@pytest.mark.usefixtures("brief_waits")
def test_a_job_that_squeue_does_not_know_any_more_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A squeue that fails says nothing about the job."""
    slurm = FakeSlurm(tmp_path / "slurm", monkeypatch)
    slurm.answer("sbatch", "Submitted batch job 7\n")
    slurm.set(jobs={"7": {"state": "RUNNING"}})
    may_be_known, looks = conversion_job._may_be_known, list[bool]()

    def look(*args) -> bool:
        looks.append(may_be_known(*args))
        if len(looks) == 2:
            slurm.set(jobs={})
            slurm.answer("squeue", err="squeue: fatal: no plugin", code=1, times=2)
        return looks[-1]

    monkeypatch.setattr(conversion_job, "_may_be_known", look)
    request = ConversionRequest(source=tmp_path, target=tmp_path / "megatron")
    with pytest.raises(RelaxError, match=r"job 7 was lost, see .*megatron\.jobs/7_0_log\.err"):
        submit(request, JobOptions(wait=True))
    assert looks[:4] == [True] * 4 and not any(looks[4:])


def kill_itself(_: object) -> partial[None]:
    return partial(signal.raise_signal, signal.SIGKILL)


@pytest.mark.usefixtures("brief_waits")
def test_a_job_that_was_killed_is_lost(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(conversion_job, "ConversionJob", kill_itself)
    request = ConversionRequest(source=tmp_path, target=tmp_path / "megatron")
    with pytest.raises(RelaxError, match="was lost"):
        submit(request, JobOptions(wait=True, cpus=1))


def test_slurm_runs_it(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    source = model(tmp_path / "hf", DENSE)
    # submitit 1.5 asks for USR2 90 s before the limit, and Slurm may send it a minute early: a
    # process that has not installed its handler by then dies.
    words = [
        "convert",
        str(source),
        str(tmp_path / "megatron"),
        "--slurm",
        "--wait",
        "--json",
        "--time",
        "30",
    ]
    assert main([*words, "--cpus", "1", "--verify", "digests"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 25
    (source / "model.safetensors").write_bytes(b"")
    words[2] = str(tmp_path / "other")
    assert main(words) == 78
    assert "model.safetensors: not a whole" in capsys.readouterr().err
