"""What the job of one group does when it loses a node, or its group; tests/cluster/test_slurm_jobs.py has
it on real Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, NoProgressError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm import jobs, lost_jobs
from relax_hpc.cluster.slurm.allocation import Allocation, GroupNodes
from relax_hpc.cluster.slurm.commands import Slurm as Commands
from relax_hpc.cluster.slurm.commands import SlurmError
from relax_hpc.cluster.slurm.jobs import GroupJob
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.slurm.successors import claim_hub
from relax_hpc.cluster.supervise.group_table import GroupTable
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.cluster.supervise.supervisor import RELEASED
from relax_hpc.config import Config
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.roster import claim_incarnation
from tests.helpers.fake_slurm import FakeSlurm


@dataclass
class Slurm:
    """Remembers what is queued again."""

    requeued: list[str] = field(default_factory=list)

    def jobs(self, *ids: str) -> dict[str, SimpleNamespace]:
        return {job: SimpleNamespace(state="RUNNING") for job in ids}

    def requeue(self, job: str) -> None:
        self.requeued.append(job)


@pytest.fixture
def job(run_dir: Path) -> GroupJob:
    run = RunDir(run_dir)
    Ledger(run).add(Submission("7", "group", "actor"))
    allocation = Allocation("7", 0, "node1", {"actor": GroupNodes("7", 2, None)})
    return GroupJob(run, Config(layout="jobs"), Slurm(), allocation, "node1")


def submitting(monkeypatch: pytest.MonkeyPatch, answer: str | SlurmError) -> None:
    def submit(*_: object) -> str:
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    monkeypatch.setattr(jobs, "submit_group", submit)


def ticked(job: GroupJob) -> SimpleNamespace:
    """The job's supervisor after its next round."""
    terminal = SimpleNamespace(say=lambda _: None)
    supervisor = SimpleNamespace(
        table=GroupTable(job.run, job.config, ["actor"]), interrupted=0, terminal=terminal
    )
    job.tick(supervisor)
    return supervisor


def released(job: GroupJob) -> set[str]:
    """Groups that the job's supervisor gives away at its next round."""
    return ticked(job).table.released


def test_another_job_takes_the_group_and_this_one_ends(
    job: GroupJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting(monkeypatch, "8")
    assert not released(job)
    assert job.launcher().hand_over("actor", "no sign") == "8"
    assert released(job) == {"actor"}
    # Whatever ends it now, a signal too.
    job.end(EXIT_RETRY)
    assert job.slurm.requeued == []


@pytest.mark.parametrize("answer", [SlurmError("refused"), SlurmError("no answer", timed_out=True)])
def test_where_none_can_be_had_it_is_queued_again(
    job: GroupJob, monkeypatch: pytest.MonkeyPatch, answer: SlurmError
) -> None:
    submitting(monkeypatch, answer)
    assert job.launcher().hand_over("actor", "no sign") == "7"
    assert job.slurm.requeued == ["7"] and not released(job)


def test_where_nodes_may_not_submit_it_is_queued_again(
    job: GroupJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting(monkeypatch, "8")
    job.config.site.sbatch_on_nodes = False
    # In this layout a held job belongs to the command `resubmit`.
    job.ledger.add(Submission("9", "spare", "actor"))
    assert job.launcher().hand_over("actor", "no sign") == "7"
    assert job.slurm.requeued == ["7"]


def test_what_is_released_for_somebody_else_is_left_alone(job: GroupJob) -> None:
    assert job.launcher().hand_over("actor", RELEASED) == "" and job.slurm.requeued == []


def test_at_its_end_it_goes_back_to_the_queue_unless_it_is_done(job: GroupJob) -> None:
    job.end(EXIT_DONE)
    assert job.slurm.requeued == []
    job.end(EXIT_RETRY)
    assert job.slurm.requeued == ["7"]


@pytest.mark.parametrize(("group", "stops"), [("hub", True), ("actor", False)])
def test_scancel_of_the_hubs_job_is_an_end_and_of_another_group_it_is_not(
    run_dir: Path, group: str, stops: bool
) -> None:
    run = RunDir(run_dir)
    slurm = SimpleNamespace(
        describe=lambda job: {
            "JobState": "COMPLETING",
            "Reason": "None",
            "Restarts": "0",
            "ExitCode": "0:0",
        }
    )
    allocation = Allocation("7", 0, "node1", {group: GroupNodes("7", 1, None)})
    GroupJob(run, Config(layout="jobs"), slurm, allocation, "node1").on_interrupt()
    assert bool(read_stop_request(run)) == stops


def test_a_job_whose_group_was_given_to_another_one_gives_way(
    job: GroupJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.ledger.add(Submission("8", "group", "actor"))
    monkeypatch.setattr(jobs, "_ASK_SLURM_S", 0.0)
    assert released(job) == {"actor"}


@pytest.mark.parametrize("told", [True, False], ids=["told", "found out"])
def test_a_job_that_gives_way_saves_first_and_does_not_come_back(job: GroupJob, told: bool) -> None:
    assert not ticked(job).interrupted
    if told:
        job.ledger.mark_retired("7")
    else:
        job.orphan_watch = SimpleNamespace(ending_reason=lambda _: True)
    supervisor = ticked(job)
    assert supervisor.interrupted == 1 and not supervisor.table.released, (
        "a group that is released would be killed"
    )
    assert job.ledger.is_retired("7")
    job.end(EXIT_RETRY)
    assert job.slurm.requeued == []


# -- the hub's job: it has a successor, and replaces the jobs of groups that are over --------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def hub(run_dir: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> GroupJob:
    """The hub's job, 6, of a run whose actor has job 7."""
    run = RunDir(run_dir)
    (run.root / "config.yaml").write_text("layout: jobs\n")
    run.submit.mkdir()
    (run.submit / "hub.sbatch").write_text("#!/bin/bash\n")
    Ledger(run).add(Submission("6", "group", "hub"))
    Ledger(run).add(Submission("7", "group", "actor"))
    fake.set(jobs={"6": {"state": "RUNNING"}, "7": {"state": "RUNNING"}})
    monkeypatch.setattr(lost_jobs, "_ASK_S", 0.0)
    numbers = count(30)

    def submit_group(run: RunDir, slurm: Commands, ledger: Ledger, name: str, *_: object) -> str:
        ledger.add(Submission(job := str(next(numbers)), "group", name))
        return job

    monkeypatch.setattr(jobs, "submit_group", submit_group)
    allocation = Allocation("6", 0, "node1", {"hub": GroupNodes("6", 1, None)})
    return GroupJob(run, Config(layout="jobs"), Commands(tries=1), allocation, "node1")


def looked(hub: GroupJob, *lacking: str) -> list[str]:
    """Lines that the hub's supervisor says in a round in which the others wait for groups."""
    lines: list[str] = []
    supervisor = SimpleNamespace(
        run=hub.run,
        config=hub.config,
        table=GroupTable(hub.run, hub.config, ["hub"]),
        interrupted=0,
        terminal=SimpleNamespace(say=lines.append),
        liveness=SimpleNamespace(awaited_groups=dict.fromkeys(lacking)),
        disk=SimpleNamespace(is_full=lambda: False),
        before_wait=lambda: None,
        failures=SimpleNamespace(check_failure=lambda *_: None, end_run=give_up),
    )
    hub.tick(supervisor)
    return lines


def give_up(name: str, reason: str, code: int) -> NoReturn:
    raise NoProgressError(f"{name}: {reason}")


def ended(fake: FakeSlurm, job: str, state: str) -> None:
    """squeue does not know a job any more; scontrol tells how it ended, or nothing."""
    fake.set(
        jobs={
            number: job_fields for number, job_fields in fake.state["jobs"].items() if number != job
        }
    )
    if state:
        fake.answer(
            "scontrol", f"JobId={job} JobState={state} Restarts=0\n", match=f"show job {job}"
        )


@pytest.mark.parametrize(
    ("state", "comes_back"),
    [
        ("FAILED", True),
        ("OUT_OF_MEMORY", True),
        ("NODE_FAIL", True),
        ("TIMEOUT", True),
        ("PREEMPTED", True),
        ("", True),
        ("CANCELLED", False),
        ("COMPLETED", False),
        ("RUNNING", False),
    ],
)
def test_a_group_whose_job_is_over_gets_another_one(
    hub: GroupJob, fake: FakeSlurm, state: str, comes_back: bool
) -> None:
    assert looked(hub, "actor") == []
    ended(fake, "7", state)
    assert looked(hub) == [], "the others do not wait for it"
    lines = looked(hub, "actor")
    assert bool(lines) == comes_back
    assert lines[1:] == ["actor: continues in job 30"][: len(lines)]
    fake.set(jobs=fake.state["jobs"] | {"30": {"state": "PENDING"}})
    assert looked(hub, "actor") == [], "once"


@pytest.mark.parametrize(
    ("refusal", "tries_again"),
    [(SlurmError("busy", transient=True), True), (SlurmError("late", timed_out=True), False)],
    ids=["busy", "late"],
)
def test_a_job_that_slurm_was_too_busy_to_make_is_tried_again(
    hub: GroupJob,
    fake: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    refusal: SlurmError,
    tries_again: bool,
) -> None:
    """After a deadline nothing is submitted again: the job may have been made."""
    submit = jobs.submit_group
    submitting(monkeypatch, refusal)
    ended(fake, "7", "FAILED")
    assert looked(hub, "actor") == [
        "actor: job 7 is over (FAILED)",
        f"actor: no job yet: {refusal}",
    ]
    monkeypatch.setattr(jobs, "submit_group", submit)
    assert looked(hub, "actor")[1:] == ["actor: continues in job 30"] * tries_again


def test_a_job_that_was_cancelled_long_ago_stays_cancelled(hub: GroupJob, fake: FakeSlurm) -> None:
    """slurmctld has forgotten how it ended; its roles have left their marks."""
    number = claim_incarnation(hub.run, "actor")
    hub.run.logs("actor", number).mkdir(parents=True)
    write_exit_mark(hub.run.exit_mark("actor", number, "actor"), 75, "asked to stop", stopped=True)
    ended(fake, "7", "")
    assert looked(hub, "actor") == []


def test_jobs_that_end_before_their_group_begins_end_the_run(
    hub: GroupJob, fake: FakeSlurm
) -> None:
    for job, following in pairwise([7, *range(30, 35)]):
        ended(fake, str(job), "FAILED")
        assert looked(hub, "actor")[-1] == f"actor: continues in job {following}"
    ended(fake, "34", "FAILED")
    with pytest.raises(NoProgressError, match="6 jobs ended before the group began"):
        looked(hub, "actor")


def test_a_member_of_a_group_is_looked_after_when_it_falls_silent(
    hub: GroupJob, fake: FakeSlurm
) -> None:
    """The others do not wait for it: the group's first member is there."""
    hub.ledger.add(Submission("8", "group", "rollout-2"))
    claim_incarnation(hub.run, "rollout-2")
    ended(fake, "8", "FAILED")
    assert looked(hub) == []
    hub.silent_groups.without_job["rollout-2"] = 1
    assert looked(hub)[-1] == "rollout-2: continues in job 30"


def test_the_hubs_job_has_one_successor(hub: GroupJob, fake: FakeSlurm) -> None:
    looked(hub)
    looked(hub)
    (call,) = fake.calls("sbatch")
    assert "--dependency=afternotok:6" in call["argv"]
    (entry,) = hub.ledger.successors(hub.attempt)
    assert (entry.group, entry.after) == ("hub", "6")


@pytest.mark.parametrize(
    ("newest", "leads"),
    [("6", True), ("7", True), ("9", False)],
    ids=["its former", "itself", "another"],
)
def test_a_successor_has_the_hub_unless_a_person_submitted_it_again(
    run_dir: Path, newest: str, leads: bool
) -> None:
    ledger = Ledger(RunDir(run_dir))
    ledger.add(Submission("6", "group", "hub"))
    ledger.add(Submission("7", "successor", "hub", after="6"))
    if newest != "6":
        ledger.add(Submission(newest, "group", "hub"))
    assert ledger.superseded("7", "hub") == (newest != "7")
    assert claim_hub(ledger, "7", attempt=1) == leads
    assert ledger.superseded("7", "hub") != leads and (ledger.superseded("6", "hub") or not leads)


def test_what_has_no_chance_is_withdrawn_with_what_can_never_start(
    hub: GroupJob, fake: FakeSlurm
) -> None:
    hub.ledger.add(Submission("20", "successor", "hub", after="5"))
    hub.ledger.add(Submission("21", "successor", "hub", after="6"))
    pending = {
        "20": {"state": "PENDING", "reason": "DependencyNeverSatisfied"},
        "21": {"state": "PENDING"},
    }
    fake.set(jobs=fake.state["jobs"] | pending)
    hub.successors.begin("6")
    assert [call["argv"][-1] for call in fake.calls("scancel")] == ["20"]
    hub.allocation = replace(hub.allocation, batch_node=hub.node)
    hub.end(EXIT_CONFIG)
    assert [call["argv"][-1] for call in fake.calls("scancel")] == ["20", "21"]
