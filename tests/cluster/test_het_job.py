"""What the job of a whole run does at its end, and when Slurm itself must be spared; see
test_slurm_waits.py."""

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
    places = {
        "hub": GroupNodes("7", 2, 0),
        "rollout": GroupNodes("8", 1, 1),
        "actor": GroupNodes("9", 1, 2),
    }
    return HetJob(
        run, Config(layout="het"), Slurm(tries=1), Allocation("7", 0, "node1", places), "node1"
    )


def lose(slurm: FakeSlurm, *ended: str, restarted: str = "") -> None:
    slurm.set(jobs={name: about for name, about in ALL.items() if name not in ended})
    if restarted:
        slurm.set(config={"BOOT_TIME": restarted})


def cancelled(slurm: FakeSlurm) -> list[str]:
    return [call["argv"][-1] for call in slurm.calls("scancel")]


@pytest.mark.parametrize(
    ("ended", "restarted", "safe"),
    [
        ((), "", True),
        (("9",), "", True),
        ((), "2026-11-23T09:00:00", True),
        (("9",), "2026-11-23T09:00:00", False),
    ],
)
def test_no_step_is_asked_of_a_slurmctld_that_would_die_of_it(
    job: HetJob, slurm: FakeSlurm, ended: tuple[str, ...], restarted: str, safe: bool
) -> None:
    lose(slurm, *ended, restarted=restarted)
    launcher = job.launcher()
    assert job.accepts_steps() == safe
    assert (
        launcher.has_lost_nodes("rollout") == (not safe)
        and launcher.has_all_nodes("rollout") == safe
    )
    assert bool(slurm.calls("srun")) == safe
    if not safe:
        with pytest.raises(SlurmError, match="slurmctld was restarted") as raised:
            launcher.start("rollout", 1, Launch(1, UNKNOWN))
        assert raised.value.is_temporary and not slurm.calls("srun")
        job.standby.tick()
        assert not slurm.calls("srun"), "no standby either"


def test_an_slurmctld_that_goes_away_is_not_taken_for_lost_nodes(
    job: HetJob, slurm: FakeSlurm
) -> None:
    slurm.answer(
        "srun",
        err="srun: error: Unable to allocate resources: Unable to contact slurm controller",
        code=1,
    )
    launcher = job.launcher()
    assert not launcher.has_all_nodes("rollout"), "Slurm answers, the nodes do not"
    answers = [False, SlurmError("squeue: no answer", transient=True)]

    def lost(_: str) -> bool:
        if isinstance(answer := answers.pop(0), SlurmError):
            raise answer
        return answer

    launcher.has_lost_nodes = lost
    with pytest.raises(SlurmError):
        launcher.has_all_nodes("rollout")


def test_what_slurm_leaves_of_the_job_is_given_back_before_the_head_is_killed(
    job: HetJob, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1000.0, time=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(jobs, "time", clock)
    job.begin(SimpleNamespace(table=GroupTable(job.run, job.config, [])))
    job.on_interrupt()
    clock.monotonic = lambda: 2000.0
    job.before_wait()
    assert not cancelled(slurm), "the job lives: it makes way, and Slurm ends all of it"
    clock.monotonic = lambda: 3000.0
    lose(slurm, "7")
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


def test_what_is_saved_in_time_is_given_back_at_once(job: HetJob, slurm: FakeSlurm) -> None:
    lose(slurm, "7")
    job.on_interrupt()
    job.end(EXIT_RETRY)
    assert cancelled(slurm) == ["8", "9"]


@pytest.mark.parametrize(
    ("code", "stopped", "goes_on"),
    [
        (EXIT_RETRY, False, True),
        (EXIT_RETRY, True, False),
        (EXIT_NO_PROGRESS, True, False),
        (EXIT_DONE, False, False),
    ],
)
def test_what_is_queued_goes_unless_the_run_is_to_go_on(
    job: HetJob, slurm: FakeSlurm, code: int, stopped: bool, goes_on: bool
) -> None:
    """But for a group's own job: the successor has a component for it."""
    for number, kind in (("20", "successor"), ("21", "spare"), ("22", "group")):
        job.ledger.add(Submission(number, kind, "actor" if kind != "successor" else ""))
    slurm.set(jobs=ALL | {number: {"state": "PENDING"} for number in ("20", "21", "22")})
    if stopped:
        request_stop(job.run, code, "it says so")
    job.end(code)
    assert cancelled(slurm) == (["22"] if goes_on else ["20", "21", "22"])


@pytest.mark.parametrize("setup", [["ulimit -n 777"], []])
def test_a_standby_has_the_limits_of_the_site(
    job: HetJob, slurm: FakeSlurm, setup: list[str]
) -> None:
    """The site's setup runs in the batch script alone."""
    slurm.set(jobs=ALL | {"7": ALL["7"] | {"node_list": "node[1-2]"}})
    (job.run.root / "logs").mkdir()
    job.config.site.setup = setup
    standby = job.make_standby()
    standby.tick()
    standby._process.wait(timeout=30)
    (call,) = slurm.calls("srun")
    assert ("--propagate=NOFILE,MEMLOCK,NPROC,STACK" in call["argv"]) == bool(setup)


# -- groups that went on in jobs of their own ------------------------------------------------------


@pytest.fixture
def moved(job: HetJob, slurm: FakeSlurm) -> HetJob:
    """The actor went on in job 22, and a member of rollout beside the first lives in 23."""
    (job.run.root / "config.yaml").write_text("layout: het\n")
    for number, name in (("22", "actor"), ("23", "rollout-2")):
        job.ledger.add(Submission(number, "group", name))
    slurm.set(jobs=ALL | {number: {"state": "RUNNING"} for number in ("22", "23")})
    return job


def begun(job: HetJob) -> SimpleNamespace:
    """What a supervisor is told that begins in the job."""
    supervisor = SimpleNamespace(table=GroupTable(job.run, job.config, ["actor"]))
    job.detached_groups.fill_table(supervisor)
    return supervisor


def test_the_job_of_a_group_is_given_back_with_that_of_the_run(
    moved: HetJob, slurm: FakeSlurm
) -> None:
    assert begun(moved).table.detached == {"actor": "22"}
    assert not moved.detached_groups.retire_group("rollout"), "it lives here"
    assert not moved.detached_groups.retire_group("rollout-2"), (
        "no successor has a component for it"
    )
    assert moved.detached_groups.retire_group("actor") and not cancelled(slurm), (
        "its supervisor has it save"
    )
    assert moved.ledger.is_retired("22")
    moved.end(EXIT_RETRY)
    assert cancelled(slurm) == ["22"]
    found = begun(moved)
    assert (found.table.detached, found.table.unfit) == ({}, {}), (
        "the successor has it in its own component"
    )


def test_what_a_head_that_is_killed_soon_has_to_give_back_is_all_of_it(
    moved: HetJob, slurm: FakeSlurm
) -> None:
    lose(slurm, "7")
    moved._retire_at = 0.0
    moved.before_wait()
    assert cancelled(slurm) == ["8", "9", "22"]


@pytest.mark.parametrize(
    ("resized", "sbatch", "along"), [(True, True, True), (True, False, False), (False, False, True)]
)
def test_a_group_with_another_size_gets_a_job_of_its_own_again(
    moved: HetJob, resized: bool, sbatch: bool, along: bool
) -> None:
    moved.config.site.sbatch_on_nodes = sbatch
    if resized:
        changes = moved.run.root / "changes"
        changes.mkdir(exist_ok=True)
        (changes / "000001-actor.yaml").write_text("groups: {actor: {resources: {nodes: 4}}}\n")
    assert moved.detached_groups.retire_group("actor") == along
    found = begun(moved)
    assert bool(found.table.detached) != along and bool(found.table.unfit) == (resized and along)


def test_a_component_that_was_given_back_is_not_used_again(moved: HetJob) -> None:
    for given_back in ("9", "22"):
        moved.ledger.mark_retired(given_back)
    assert "cancelled" in begun(moved).table.unfit["actor"]


def test_a_job_that_gave_way_to_nobody_hands_its_group_to_this_one(
    moved: HetJob, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor had found the predecessor's job gone, and not yet this one there."""
    record_launch(
        moved.run, "actor", claim_incarnation(moved.run, "actor"), Launch(1, UNKNOWN, job="22")
    )
    back: list[str] = []
    supervisor = begun(moved)
    supervisor.restart_group = lambda name, _: back.append(name)
    moved.ledger.mark_retired("22")
    moved.detached_groups._check_jobs(supervisor)
    assert not back, "it still saves"
    slurm.set(jobs=ALL)
    moved.detached_groups._check_jobs(supervisor)
    assert back == ["actor"] and not supervisor.table.detached and not supervisor.table.unfit
