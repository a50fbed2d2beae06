"""The job of a heterogeneous run: its end, and steps that would crash slurmctld. See
test_slurm_waits.py for the same with a real Slurm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.base.errors import EXIT_DONE, EXIT_NO_PROGRESS, EXIT_RETRY
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm import jobs
from relax_hpc.cluster.slurm.allocation import Allocation, GroupNodes
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.jobs import HetJob
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise.group_table import GroupTable
from relax_hpc.cluster.supervise.launch_records import UNKNOWN, Launch, record_launch
from relax_hpc.cluster.supervise.requests import request_stop
from relax_hpc.config import Config
from relax_hpc.net.rendezvous.roster import claim_incarnation
from tests.helpers.fake_slurm import FakeSlurm

ALL = {"7": {"state": "RUNNING", "het": "7+0", "nodes": 2}, "8": {"state": "RUNNING", "het": "7+1"}}
ALL |= {"9": {"state": "RUNNING", "het": "7+2"}}
STARTED = "2026-11-23T08:00:00"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm", monkeypatch)
    fake.set(jobs=ALL, config={"BOOT_TIME": "2026-11-22T08:00:00", "KillWait": "20 sec"})
    fake.answer("scontrol", f"JobId=7 JobState=RUNNING StartTime={STARTED}\n", match="show job")
    return fake


@pytest.fixture
def job(run_dir: Path, slurm: FakeSlurm) -> HetJob:
    run = RunDir(run_dir)
    Ledger(run).add(Submission("7", "run"))
    group_nodes = {
        "hub": GroupNodes("7", 2, 0),
        "rollout": GroupNodes("8", 1, 1),
        "actor": GroupNodes("9", 1, 2),
    }
    return HetJob(
        run, Config(layout="het"), Slurm(tries=1), Allocation("7", 0, "node1", group_nodes), "node1"
    )


def lose_jobs(slurm: FakeSlurm, *ended_jobs: str, boot_time: str = "") -> None:
    slurm.set(jobs={name: record for name, record in ALL.items() if name not in ended_jobs})
    if boot_time:
        slurm.set(config={"BOOT_TIME": boot_time})


def cancelled(slurm: FakeSlurm) -> list[str]:
    return [call["argv"][-1] for call in slurm.calls("scancel")]


@pytest.mark.parametrize(
    ("ended_jobs", "boot_time", "accepts_steps"),
    [
        ((), "", True),
        (("9",), "", True),
        ((), "2026-11-23T09:00:00", True),
        (("9",), "2026-11-23T09:00:00", False),
    ],
)
def test_no_step_is_requested_if_it_would_crash_slurmctld(
    job: HetJob, slurm: FakeSlurm, ended_jobs: tuple[str, ...], boot_time: str, accepts_steps: bool
) -> None:
    lose_jobs(slurm, *ended_jobs, boot_time=boot_time)
    launcher = job.launcher()
    assert job.accepts_steps() == accepts_steps
    assert (
        launcher.has_lost_nodes("rollout") == (not accepts_steps)
        and launcher.has_all_nodes("rollout") == accepts_steps
    )
    assert bool(slurm.calls("srun")) == accepts_steps
    if not accepts_steps:
        with pytest.raises(SlurmError, match="slurmctld was restarted") as raised:
            launcher.start("rollout", 1, Launch(1, UNKNOWN))
        assert raised.value.is_temporary and not slurm.calls("srun")
        job.standby.tick()
        assert not slurm.calls("srun"), "a standby would be a step too"


def test_an_unreachable_slurmctld_does_not_count_as_lost_nodes(
    job: HetJob, slurm: FakeSlurm
) -> None:
    slurm.answer(
        "srun",
        err="srun: error: Unable to allocate resources: Unable to contact slurm controller",
        code=1,
    )
    launcher = job.launcher()
    assert not launcher.has_all_nodes("rollout"), "squeue answers, but the step fails"
    answers = [False, SlurmError("squeue: no answer", transient=True)]

    def lost(_: str) -> bool:
        if isinstance(answer := answers.pop(0), SlurmError):
            raise answer
        return answer

    launcher.has_lost_nodes = lost
    with pytest.raises(SlurmError):
        launcher.has_all_nodes("rollout")


def test_remaining_jobs_are_cancelled_before_the_head_is_killed(
    job: HetJob, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1000.0, time=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(jobs, "time", clock)
    job.begin(SimpleNamespace(table=GroupTable(job.run, job.config, [])))
    job.on_interrupt()
    clock.monotonic = lambda: 2000.0
    job.before_wait()
    assert not cancelled(slurm), "the job still runs, and Slurm will end all of it"
    clock.monotonic = lambda: 3000.0
    lose_jobs(slurm, "7")
    job.on_interrupt()
    clock.monotonic = lambda: 3009.0
    job.before_wait()
    assert not cancelled(slurm), "there is time to save"
    clock.monotonic = lambda: 3010.0
    job.before_wait()
    job.before_wait()
    assert cancelled(slurm) == ["8", "9"] and Ledger(job.run).is_retired("9")
    job.end(EXIT_RETRY)
    assert cancelled(slurm) == ["8", "9"]


def test_remaining_jobs_are_cancelled_immediately_after_a_save(
    job: HetJob, slurm: FakeSlurm
) -> None:
    lose_jobs(slurm, "7")
    job.on_interrupt()
    job.end(EXIT_RETRY)
    assert cancelled(slurm) == ["8", "9"]


@pytest.mark.parametrize(
    ("code", "stopped", "continues"),
    [
        (EXIT_RETRY, False, True),
        (EXIT_RETRY, True, False),
        (EXIT_NO_PROGRESS, True, False),
        (EXIT_DONE, False, False),
    ],
)
def test_pending_jobs_are_cancelled_unless_the_run_continues(
    job: HetJob, slurm: FakeSlurm, code: int, stopped: bool, continues: bool
) -> None:
    """A group's separate job is always cancelled, because the successor has a component for it."""
    for number, kind in (("20", "successor"), ("21", "spare"), ("22", "group")):
        job.ledger.add(Submission(number, kind, "actor" if kind != "successor" else ""))
    slurm.set(jobs=ALL | {number: {"state": "PENDING"} for number in ("20", "21", "22")})
    if stopped:
        request_stop(job.run, code, "it says so")
    job.end(code)
    assert cancelled(slurm) == (["22"] if continues else ["20", "21", "22"])


@pytest.mark.parametrize("setup", [["ulimit -n 777"], []])
def test_a_standby_inherits_limits_only_with_a_setup(
    job: HetJob, slurm: FakeSlurm, setup: list[str]
) -> None:
    """The site's setup runs only in the batch script."""
    slurm.set(jobs=ALL | {"7": ALL["7"] | {"node_list": "node[1-2]"}})
    (job.run.root / "logs").mkdir()
    job.config.site.setup = setup
    standby = job.make_standby()
    standby.tick()
    standby._process.wait(timeout=30)
    (call,) = slurm.calls("srun")
    assert ("--propagate=NOFILE,MEMLOCK,NPROC,STACK" in call["argv"]) == bool(setup)


# -- groups in separate jobs -----------------------------------------------------------------------


@pytest.fixture
def job_with_detached(job: HetJob, slurm: FakeSlurm) -> HetJob:
    """The actor continues in job 22, and a second rollout group runs in job 23."""
    (job.run.root / "config.yaml").write_text("layout: het\n")
    for number, name in (("22", "actor"), ("23", "rollout-2")):
        job.ledger.add(Submission(number, "group", name))
    slurm.set(jobs=ALL | {number: {"state": "RUNNING"} for number in ("22", "23")})
    return job


def new_supervisor(job: HetJob) -> SimpleNamespace:
    """A supervisor that starts in the job, with its table of groups."""
    supervisor = SimpleNamespace(table=GroupTable(job.run, job.config, ["actor"]))
    job.detached_groups.fill_table(supervisor)
    return supervisor


def test_a_detached_job_is_cancelled_with_that_of_the_run(
    job_with_detached: HetJob, slurm: FakeSlurm
) -> None:
    assert new_supervisor(job_with_detached).table.detached == {"actor": "22"}
    assert not job_with_detached.detached_groups.retire_group("rollout"), "it runs in this job"
    assert not job_with_detached.detached_groups.retire_group("rollout-2"), (
        "no successor has a component for it"
    )
    assert job_with_detached.detached_groups.retire_group("actor") and not cancelled(slurm), (
        "its supervisor saves first"
    )
    assert job_with_detached.ledger.is_retired("22")
    job_with_detached.end(EXIT_RETRY)
    assert cancelled(slurm) == ["22"]
    successor = new_supervisor(job_with_detached)
    assert (successor.table.detached, successor.table.unfit) == ({}, {}), (
        "the successor has a component for the group"
    )


def test_a_head_that_will_be_killed_cancels_all_its_jobs(
    job_with_detached: HetJob, slurm: FakeSlurm
) -> None:
    lose_jobs(slurm, "7")
    job_with_detached._retire_at = 0.0
    job_with_detached.before_wait()
    assert cancelled(slurm) == ["8", "9", "22"]


@pytest.mark.parametrize(
    ("resized", "can_submit", "is_cancelled_too"),
    [(True, True, True), (True, False, False), (False, False, True)],
)
def test_a_resized_group_gets_another_separate_job(
    job_with_detached: HetJob, resized: bool, can_submit: bool, is_cancelled_too: bool
) -> None:
    job_with_detached.config.site.sbatch_on_nodes = can_submit
    if resized:
        changes = job_with_detached.run.root / "changes"
        changes.mkdir(exist_ok=True)
        (changes / "000001-actor.yaml").write_text("groups: {actor: {resources: {nodes: 4}}}\n")
    assert job_with_detached.detached_groups.retire_group("actor") == is_cancelled_too
    successor = new_supervisor(job_with_detached)
    assert bool(successor.table.detached) != is_cancelled_too and bool(successor.table.unfit) == (
        resized and is_cancelled_too
    )


def test_a_cancelled_job_is_not_used_again(job_with_detached: HetJob) -> None:
    for retired_job in ("9", "22"):
        job_with_detached.ledger.mark_retired(retired_job)
    assert "cancelled" in new_supervisor(job_with_detached).table.unfit["actor"]


def test_a_group_restarts_here_if_its_detached_job_retired_without_successor(
    job_with_detached: HetJob, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's supervisor saw that the former run job had ended, but not yet this job."""
    record_launch(
        job_with_detached.run,
        "actor",
        claim_incarnation(job_with_detached.run, "actor"),
        Launch(1, UNKNOWN, job="22"),
    )
    restarted_groups: list[str] = []
    supervisor = new_supervisor(job_with_detached)
    supervisor.restart_group = lambda name, _: restarted_groups.append(name)
    job_with_detached.ledger.mark_retired("22")
    job_with_detached.detached_groups._check_jobs(supervisor)
    assert not restarted_groups, "it still saves"
    slurm.set(jobs=ALL)
    job_with_detached.detached_groups._check_jobs(supervisor)
    assert (
        restarted_groups == ["actor"]
        and not supervisor.table.detached
        and not supervisor.table.unfit
    )
