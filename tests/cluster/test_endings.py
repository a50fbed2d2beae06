"""Who ended a job, by what Slurm 22.05.8 said of jobs that ended in every way, while they did and
afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.job_endings import is_cancelled, retire_job, stop_if_user_cancelled
from relax_hpc.cluster.slurm.orphans import OrphanedComponent, OrphanedGroupJob
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise.launch_records import Launch, record_launch
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.config import Config
from relax_hpc.net.rendezvous.roster import claim_incarnation
from tests.helpers.fake_slurm import FakeSlurm

ENDING = "JobState=COMPLETING Reason=None Restarts=0 ExitCode=0:0"
SAID = {
    "scancel": (ENDING, True),
    "scancel where jobs can be preempted": (f"{ENDING} PreemptTime=None", True),
    "scancel, at its end": ("JobState=COMPLETING Reason=None Restarts=0 ExitCode=0:9", True),
    "scancel, afterwards": ("JobState=CANCELLED Reason=None Restarts=0 ExitCode=0:9", True),
    "scontrol requeue": ("JobState=COMPLETING Reason=None Restarts=1 ExitCode=0:0", False),
    "preemption": (f"{ENDING} PreemptTime=2026-11-23T08:26:00", False),
    "preemption, afterwards": ("JobState=PREEMPTED Reason=None Restarts=0 ExitCode=0:9", False),
    "time limit": (
        "JobState=COMPLETING Reason=TimeLimit Restarts=0 ExitCode=0:0 PreemptTime=None",
        False,
    ),
    "time limit, afterwards": ("JobState=TIMEOUT Reason=TimeLimit Restarts=0 ExitCode=0:9", False),
    "loss of a node": ("JobState=COMPLETING Reason=NodeDown Restarts=0 ExitCode=0:0", False),
    "loss of a node, afterwards": (
        "JobState=NODE_FAIL Reason=NodeDown Restarts=0 ExitCode=0:9",
        False,
    ),
    "exit 75": ("JobState=COMPLETING Reason=NonZeroExitCode Restarts=0 ExitCode=75:0", False),
    "exit 75, afterwards": (
        "JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=75:0",
        False,
    ),
    "nothing": ("JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0", False),
    "it is forgotten": ("", False),
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


@pytest.mark.parametrize(("said", "cancelled"), SAID.values(), ids=SAID)
def test_scancel_leaves_no_trace_and_everything_else_does(said: str, cancelled: bool) -> None:
    assert is_cancelled(dict(word.split("=") for word in said.split()), restarts=0) == cancelled


def test_the_user_is_heeded_and_what_we_cancel_ourselves_is_not(
    run_dir: Path, slurm: FakeSlurm
) -> None:
    run = RunDir(run_dir)
    comment = "Comment=JobState=RUNNING JobId=9"
    lines = [f"JobId={job} HetJobId=7 {ENDING} {comment}" for job in ("7", "8")]
    slurm.answer("scontrol", "\n".join(lines) + "\n", match="show job")
    retire_job(run, Slurm(), "8")
    assert not stop_if_user_cancelled(run, Slurm(), "8", 0) and not read_stop_request(run)
    assert stop_if_user_cancelled(run, Slurm(), "7", 0)
    assert read_stop_request(run) == {"code": 0, "reason": "job 7 was cancelled"}


def test_slurm_that_does_not_answer_says_nothing(run_dir: Path, slurm: FakeSlurm) -> None:
    run = RunDir(run_dir)
    slurm.answer("scontrol", err="Unable to contact slurm controller", code=1)
    assert not stop_if_user_cancelled(run, Slurm(tries=1), "7", 0) and not read_stop_request(run)


def test_a_successor_knows_whom_it_follows(run_dir: Path) -> None:
    ledger = Ledger(RunDir(run_dir))
    for entry in (
        Submission("7", "run"),
        Submission("8", "successor", after="7"),
        Submission("9", "successor", after="8"),
    ):
        ledger.add(entry)
    assert [ledger.predecessor(job) for job in ("7", "8", "9")] == ["", "7", "8"]


# -- components that nobody needs any more ---------------------------------------------------------


@pytest.fixture
def orphan(run_dir: Path) -> OrphanedComponent:
    """Component 9 of job 7, whose head beat at 0 s; the lease is 30 s."""
    run = RunDir(run_dir)
    record_launch(
        run,
        "actor",
        claim_incarnation(run, "actor"),
        Launch(1, (0, 0, 0), job="9", allocation="7-0"),
    )
    beats(run, 0)
    return OrphanedComponent(run, Config(), Slurm(), "actor", 1)


def beats(run: RunDir, number: int, job: str = "7", name: str = "supervisor") -> None:
    run.rendezvous(name).mkdir(parents=True, exist_ok=True)
    about = {"incarnation": 1, "beat": number, "node": "n1", "allocation": f"{job}-0", "pid": 1}
    write_json(run.rendezvous(name) / "lease", about)


def given_back(slurm: FakeSlurm) -> list[str]:
    return [call["argv"][-1] for call in slurm.calls("scancel")]


def looked(left: OrphanedComponent | OrphanedGroupJob, *seconds: float) -> list[bool]:
    began = left.head.last_beat[1]
    check = left.check if isinstance(left, OrphanedComponent) else left.ending_reason
    return [bool(check(began + second)) for second in seconds]


def test_an_orphan_gives_its_nodes_back(orphan: OrphanedComponent, slurm: FakeSlurm) -> None:
    slurm.set(jobs={"9": {"state": "RUNNING", "het": "7+2"}})
    assert looked(orphan, 1.0, 59.0) == [False, False] and not slurm.calls("squeue")
    assert looked(orphan, 63.0) == [True] and given_back(slurm) == ["9"]
    assert Ledger(orphan.run).is_retired("9")


def test_headless_groups_live_on_as_long_as_their_job_does(
    orphan: OrphanedComponent, slurm: FakeSlurm
) -> None:
    slurm.set(jobs={"7": {"state": "RUNNING"}, "9": {"state": "RUNNING", "het": "7+2"}})
    assert not any(looked(orphan, 1.0, 63.0, 64.0, 70.0, 200.0)) and not given_back(slurm)
    assert len(slurm.calls("squeue")) == 2, "not at every look"


def test_a_head_that_beats_looks_after_its_components(
    orphan: OrphanedComponent, slurm: FakeSlurm
) -> None:
    for number, second in enumerate((50.0, 100.0, 150.0)):
        beats(orphan.run, number + 1)
        assert looked(orphan, second) == [False]
        orphan.head.last_beat = (orphan.head.last_beat[0], orphan.head.last_beat[1] - second)
    beats(orphan.run, 9, job="11")
    looked(orphan, 1.0)
    assert looked(orphan, 400.0) == [True], "a successor that leads does not speak for it"


def test_what_cannot_outlive_its_job_is_none(run_dir: Path) -> None:
    run = RunDir(run_dir)
    record_launch(
        run,
        "actor",
        claim_incarnation(run, "actor"),
        Launch(1, (0, 0, 0), job="7", allocation="7-0"),
    )
    assert not OrphanedComponent(run, Config(), Slurm(), "actor", 1).can_be_orphaned()


# -- jobs that one group has to itself, when nobody leads the run any more -------------------------


def bereft(run_dir: Path, layout: str, group: str = "actor") -> OrphanedGroupJob:
    """Of job 9; the hub's, 7, beat at 0 s; the lease is 30 s."""
    run, ledger = RunDir(run_dir), Ledger(RunDir(run_dir))
    entries = (
        [Submission("7", "run"), Submission("8", "successor", after="7")]
        if layout == "het"
        else [Submission("7", "group", "hub")]
    )
    for entry in (*entries, Submission("9", "group", group)):
        ledger.add(entry)
    found = OrphanedGroupJob(run, Config(layout=layout), Slurm(tries=1), group, "9")
    beats(run, 0, name=found.name)
    return found


def said_of(slurm: FakeSlurm, job: str, words: str) -> None:
    slurm.answer("scontrol", f"JobId={job} Restarts=0 {words}\n", match=f"show job {job}")


@pytest.mark.parametrize("layout", ["het", "jobs"])
def test_a_head_that_was_killed_before_it_could_say_so_was_cancelled(
    run_dir: Path, slurm: FakeSlurm, layout: str
) -> None:
    found = bereft(run_dir, layout)
    slurm.set(jobs={"8": {"state": "PENDING"}, "9": {"state": "RUNNING"}})
    said_of(slurm, "7", "JobState=CANCELLED ExitCode=0:9")
    assert looked(found, 1.0, 59.0) == [False, False] and not read_stop_request(found.run)
    assert looked(found, 63.0) == [False], "it ends with the run, not for a successor"
    assert read_stop_request(found.run) == {"code": 0, "reason": "job 7 was cancelled"}


def test_the_job_of_a_group_gives_way_when_that_of_the_run_is_over(
    run_dir: Path, slurm: FakeSlurm
) -> None:
    found = bereft(run_dir, "het")
    said_of(slurm, "7", "JobState=NODE_FAIL Reason=NodeDown ExitCode=0:9")
    for state, leaves in (
        ("RUNNING", False),
        ("SUSPENDED", False),
        ("COMPLETING", True),
        ("NODE_FAIL", True),
    ):
        slurm.set(jobs={"7": {"state": state}, "8": {"state": "PENDING"}})
        found.head.last_beat, found.head._ask_at = (
            (found.head.last_beat[0], found.head.last_beat[1] - 63.0),
            0.0,
        )
        assert looked(found, 63.0) == [leaves], state
    slurm.set(jobs={"8": {"state": "RUNNING"}})
    assert looked(found, 80.0) == [False], "the successor is there, and its head about to lead"
    assert not read_stop_request(found.run) and not Ledger(found.run).is_retired("9")


@pytest.mark.parametrize(("layout", "group"), [("jobs", "actor"), ("het", "rollout-2")])
def test_where_no_component_is_its_own_it_waits_for_the_hub(
    run_dir: Path, slurm: FakeSlurm, layout: str, group: str
) -> None:
    found = bereft(run_dir, layout, group)
    Ledger(found.run).add(Submission("10", "successor", "hub", after="7"))
    slurm.set(jobs={"9": {"state": "RUNNING"}, "10": {"state": "PENDING", "reason": "Dependency"}})
    said_of(slurm, "7", "JobState=NODE_FAIL Reason=NodeDown ExitCode=0:9")
    assert looked(found, 63.0, 80.0) == [False, False] and not read_stop_request(found.run)


@pytest.mark.parametrize(
    ("hub_jobs", "ends"),
    [
        ({}, True),
        ({"7": {"state": "RUNNING"}}, False),
        ({"7": {"state": "COMPLETING"}}, False),
        ({"7": {"state": "PENDING", "reason": "BeginTime"}}, False),
        ({"10": {"state": "PENDING", "reason": "Dependency"}}, False),
        ({"10": {"state": "PENDING", "reason": "DependencyNeverSatisfied"}}, True),
    ],
)
def test_a_job_ends_when_no_job_of_the_hub_can_come(
    run_dir: Path, slurm: FakeSlurm, hub_jobs: dict[str, dict[str, str]], ends: bool
) -> None:
    """In the layout `jobs`: else it would hold its nodes, idle, to its time limit."""
    watch = bereft(run_dir, "jobs")
    Ledger(watch.run).add(Submission("10", "successor", "hub", after="7"))
    said_of(slurm, "7", "JobState=FAILED Reason=NonZeroExitCode ExitCode=0:9")
    slurm.set(jobs={"9": {"state": "RUNNING"}} | hub_jobs)
    assert looked(watch, 1.0) == [False]
    assert looked(watch, 63.0) == [ends] and not read_stop_request(watch.run)
    # A slurmctld that does not even know this job has lost its state.
    slurm.set(jobs=hub_jobs)
    watch.head._ask_at = 0.0
    assert looked(watch, 80.0) == [False]


def test_a_hub_that_a_person_has_submitted_by_hand_is_asked_for_too(
    run_dir: Path, slurm: FakeSlurm
) -> None:
    """The ledger does not have its job; its lease does."""
    run = RunDir(run_dir)
    Ledger(run).add(Submission("9", "group", "actor"))
    watch = OrphanedGroupJob(run, Config(layout="jobs"), Slurm(tries=1), "actor", "9")
    beats(run, 0, name=watch.name)
    said_of(slurm, "7", "JobState=RUNNING Reason=None")
    slurm.set(jobs={"7": {"state": "RUNNING"}, "9": {"state": "RUNNING"}})
    assert looked(watch, 1.0, 63.0) == [False, False]


def test_slurm_that_does_not_answer_takes_nobody_away(run_dir: Path, slurm: FakeSlurm) -> None:
    found = bereft(run_dir, "het")
    slurm.answer("scontrol", err="Unable to contact slurm controller", code=1)
    slurm.answer("squeue", err="Unable to contact slurm controller", code=1)
    assert looked(found, 63.0, 80.0) == [False, False]
