"""Slurm's commands behind one runner: retries, deadlines, and answers that make no sense, on a fake
Slurm."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from relax_hpc.cluster.slurm import commands
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError, clean_environment, parse_time
from tests.helpers.fake_slurm import FakeSlurm

DOWN = {
    "err": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
    "code": 1,
}
BUSY = {
    "err": "sbatch: error: Batch job submission failed: Resource temporarily unavailable\n",
    "code": 1,
}
UNSURE = {
    "err": "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
    "code": 1,
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(commands, "_PAUSES_S", (0.01, 0.02, 0.02))
    return FakeSlurm(tmp_path / "fake slurm", monkeypatch)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text(
        "#!/bin/bash\n#SBATCH --comment='my words'\n#SBATCH hetjob\n#SBATCH --comment=other\n"
    )
    return path


def one_line(error: SlurmError) -> str:
    text = str(error)
    assert "\n" not in text and len(text) < 700
    return text


def test_more_jobs_than_an_argument_can_name(fake: FakeSlurm) -> None:
    """Linux allows 128 KiB; a folder with many runs that were never finished has more."""
    last = "10000029999"
    fake.set(jobs={last: {"state": "RUNNING"}})
    assert list(Slurm(tries=1).jobs(*map(str, range(10**10, 10**10 + 29_000)), last)) == [last]


def test_submit_and_look(fake: FakeSlurm, script: Path) -> None:
    slurm = Slurm()
    job = slurm.submit(script, "--job-name=a|b'c $(date)")
    assert slurm.jobs(job, "7")[job].name == "a|b'c $(date)"
    assert (slurm.jobs(job)[job].time_left_s, slurm.jobs(job)[job].used_s) == (600.0, 7.0)
    # Tagged, with the user's own comment of the first component kept.
    assert fake.state["jobs"][job]["comment"].startswith("my words relax-hpc-")
    slurm.cancel(job)
    assert slurm.jobs(job) == {}
    assert slurm.jobs() == {}


def test_components_have_plain_ids(fake: FakeSlurm) -> None:
    fake.set(
        jobs={
            "8": {"het": "8+0", "state": "RUNNING"},
            "9": {"het": "8+1", "nodes": 2, "node_list": "n[1-2]"},
        }
    )
    found = Slurm().jobs("8", "9")
    assert list(found) == ["8", "9"]
    assert (found["9"].het_leader, found["9"].het_offset, found["9"].nodes) == ("8", 1, 2)
    assert list(Slurm().jobs("8")) == ["8"]
    assert list(Slurm().own_jobs()) == ["8", "9"]
    assert len(fake.calls("squeue")) == 3


def test_transient_answers_are_retried(fake: FakeSlurm) -> None:
    fake.set(jobs={"8": {"state": "RUNNING"}})
    fake.answer("squeue", times=2, **DOWN)
    assert Slurm().jobs("8")["8"].state == "RUNNING"
    assert len(fake.calls("squeue")) == 3


def test_tries_are_bounded(fake: FakeSlurm) -> None:
    fake.answer("squeue", **DOWN)
    with pytest.raises(SlurmError) as error:
        Slurm(tries=2).jobs("8")
    assert len(fake.calls("squeue")) == 2
    assert error.value.transient
    assert "Unable to contact slurm controller" in one_line(error.value)
    assert "scontrol ping" in one_line(error.value)


def test_the_deadline_bounds_all_tries(fake: FakeSlurm) -> None:
    fake.answer("squeue", **DOWN)
    started = time.monotonic()
    with pytest.raises(SlurmError):
        Slurm(timeout_s=0.6, tries=100).jobs("8")
    assert time.monotonic() - started < 3


def test_a_refusal_is_not_retried(fake: FakeSlurm, script: Path) -> None:
    fake.answer("sbatch", err="sbatch: error: invalid partition specified: nope\n", code=1)
    with pytest.raises(SlurmError, match="invalid partition specified: nope"):
        Slurm().submit(script)
    assert len(fake.calls("sbatch")) == 1


def test_a_slow_command_meets_its_deadline(fake: FakeSlurm) -> None:
    fake.answer("squeue", sleep_s=30)
    started = time.monotonic()
    with pytest.raises(SlurmError) as error:
        Slurm(timeout_s=0.5).jobs("8")
    assert time.monotonic() - started < 5
    assert error.value.timed_out
    assert "no answer within 0.5 s" in one_line(error.value)


def test_a_busy_controller_makes_no_job_so_sbatch_is_tried_again(
    fake: FakeSlurm, script: Path
) -> None:
    fake.answer("sbatch", times=1, **BUSY)
    assert Slurm().submit(script) == "100"
    assert len(fake.calls("sbatch")) == 2


@pytest.mark.parametrize("how", [UNSURE, {"sleep_s": 30}])
def test_a_job_that_may_exist_is_not_made_twice(fake: FakeSlurm, script: Path, how: dict) -> None:
    fake.answer("sbatch", **how)
    slurm = Slurm(timeout_s=1.0)
    with pytest.raises(SlurmError, match=r"may still appear.*relax-hpc-[0-9a-f]{12}"):
        slurm.submit(script)
    # On a busy machine the program may be ended before it has noted that it was called.
    assert len(fake.calls("sbatch")) <= 1


def test_the_job_of_an_unsure_submission_is_found_by_its_tag(
    fake: FakeSlurm, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda n: "feed")
    fake.set(
        jobs={
            "40": {"het": "40+0", "comment": "x relax-hpc-feed"},
            "41": {"het": "40+1", "comment": "y"},
        }
    )
    fake.answer("sbatch", **UNSURE)
    assert Slurm().submit(script) == "40"
    assert len(fake.calls("sbatch")) == 1


def test_a_queue_that_cannot_be_read_leaves_the_submission_open(
    fake: FakeSlurm, script: Path
) -> None:
    fake.answer("sbatch", **UNSURE)
    fake.answer("squeue", **DOWN)
    with pytest.raises(SlurmError, match="it is not known whether the job was created"):
        Slurm(tries=1).submit(script)
    assert len(fake.calls("sbatch")) == 1


@pytest.mark.parametrize("out", ["", "segmentation fault\n", "Submitted batch job\n"])
def test_rubbish_of_sbatch(fake: FakeSlurm, script: Path, out: str) -> None:
    fake.answer("sbatch", out)
    with pytest.raises(SlurmError, match="expected a job id"):
        Slurm().submit(script)


def test_a_banner_and_a_cluster_are_no_part_of_the_id(fake: FakeSlurm, script: Path) -> None:
    fake.answer("sbatch", "Welcome to the cluster\n123;big\n")
    assert Slurm().submit(script) == "123"


@pytest.mark.parametrize(
    "out", ["rubbish\n", "8|8|RUNNING\n", "8|eight|RUNNING|1|n1|0:01|1:00|None|x\n"]
)
def test_rubbish_of_squeue(fake: FakeSlurm, out: str) -> None:
    fake.answer("squeue", out)
    with pytest.raises(SlurmError) as error:
        Slurm().jobs("8")
    assert "squeue" in one_line(error.value) and "expected" in one_line(error.value)


def test_rubbish_of_the_others(fake: FakeSlurm) -> None:
    fake.answer("sinfo", "what?\n")
    fake.answer("scontrol", "what?\n")
    for call in (Slurm().nodes, Slurm().version, Slurm().partitions):
        with pytest.raises(SlurmError, match="expected"):
            call()


def test_a_missing_program_is_named(fake: FakeSlurm) -> None:
    assert Slurm().available()
    fake.remove("squeue")
    assert Slurm().missing() == ["squeue"]
    with pytest.raises(SlurmError, match="squeue: not found on PATH; load the site's Slurm module"):
        Slurm().jobs("8")


def test_a_program_that_may_not_be_run(fake: FakeSlurm) -> None:
    (fake.bin / "squeue").chmod(0o644)
    with pytest.raises(SlurmError, match="squeue: cannot be started: Permission denied"):
        Slurm().jobs("8")


@pytest.mark.parametrize(
    "how",
    [
        {
            "err": "scancel: error: Kill job error on job id 8: Invalid job id specified\n",
            "code": 1,
        },
        {
            "err": "scancel: error: Kill job error on job id 8: Job/step already completing or "
            "completed\n",
            "code": 1,
        },
        {"code": 229},
    ],
)
def test_cancelling_what_has_ended(fake: FakeSlurm, how: dict) -> None:
    fake.answer("scancel", **how)
    Slurm().cancel("8", "USR1", batch=True)
    assert fake.calls("scancel")[0]["argv"] == ["--signal=USR1", "--batch", "8"]


def test_cancelling_what_belongs_to_another(fake: FakeSlurm) -> None:
    fake.answer(
        "scancel",
        err="scancel: error: Kill job error on job id 8: Access/permission denied\n",
        code=1,
    )
    with pytest.raises(SlurmError, match="permission denied"):
        Slurm().cancel("8+1")


def test_requeue_hold_release(fake: FakeSlurm) -> None:
    fake.set(jobs={"8": {"state": "RUNNING"}})
    Slurm().requeue("8")
    Slurm().hold("8")
    Slurm().release("8")
    assert Slurm().jobs("8")["8"].state == "PENDING"
    with pytest.raises(SlurmError, match="Invalid job id"):
        Slurm().requeue("9")


def test_what_the_cluster_is(fake: FakeSlurm) -> None:
    slurm = Slurm()
    assert slurm.version() == "22.05.8"
    assert slurm.mpi_plugins() == ["pmix", "none", "pmi2", "pmix_v4"]
    assert slurm.node_states()["node4"] == "idle"
    assert (slurm.nodes()[0].gres, slurm.nodes()[0].partition) == ("gpu:4", "main")
    assert slurm.partitions()["main"]["MaxTime"] == "1-00:00:00"
    assert slurm.config()["KillWait"] == "60 sec"
    assert slurm.hostnames("node[1-2]") == ["node1", "node2"]
    assert slurm.hostnames("") == []
    assert slurm.associations() == []


def test_what_accounting_says(fake: FakeSlurm) -> None:
    fake.answer("sacctmgr", "proj1|normal,long|10|100\n")
    assert Slurm().associations()[0]["QOS"] == "normal,long"


def test_steps(fake: FakeSlurm) -> None:
    fake.set(jobs={"9": {"steps": {"9.0": "actor", "9.batch": "batch"}}})
    assert Slurm().steps("9") == {"9.0": "actor", "9.batch": "batch"}
    assert Slurm().steps("10") == {}


def test_the_callers_job_is_kept_away(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "SLURM_JOB_ID",
        "SBATCH_PARTITION",
        "SRUN_DEBUG",
        "SQUEUE_STATES",
        "SLURM_CONF",
        "SLURMETTE",
    ):
        monkeypatch.setenv(name, "x")
    Slurm().jobs("8")
    kept = {
        name
        for name in fake.calls("squeue")[0]["env"]
        if name.startswith(("SLURM", "SBATCH", "SRUN", "SQUEUE"))
    }
    assert kept == {"SLURM_CONF", "SLURMETTE"}
    assert "SLURM_JOB_ID" not in clean_environment()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("4:57", 297),
        ("1:00:00", 3600),
        ("2-3", 183600),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_times(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("times", "is_preempted"),
    [
        ("StartTime=2026-01-02T10:00:00 PreemptTime=2026-01-02T11:00:00", True),
        ("StartTime=2026-01-02T10:00:00 PreemptTime=2026-01-02T10:00:00", True),
        ("StartTime=2026-01-02T10:00:00 PreemptTime=2026-01-01T11:00:00", False),
        (
            "StartTime=2026-01-02T10:00:00 PreemptEligibleTime=2026-01-02T10:00:00 "
            "PreemptTime=None",
            False,
        ),
        ("StartTime=2026-01-02T10:00:00", False),
    ],
    ids=["now", "at once", "in an earlier life", "not", "no preemption here"],
)
def test_a_job_in_its_grace_time_is_preempted(
    fake: FakeSlurm, times: str, is_preempted: bool
) -> None:
    fake.answer("scontrol", f"JobId=7 JobState=RUNNING {times}\n", match="show job 7")
    assert Slurm().is_preempted("7") == is_preempted
