"""What the job of one group does when it loses a node, or its group; tests/test_slurm_jobs.py has it on real Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.config import Config
from relax_hpc.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.rundir import RunDir
from relax_hpc.slurm import jobs
from relax_hpc.slurm.allocation import Allocation, Place
from relax_hpc.slurm.commands import SlurmError
from relax_hpc.slurm.jobs import GroupJob
from relax_hpc.slurm.submissions import Entry, Ledger
from relax_hpc.supervise.requests import asked_to_stop
from relax_hpc.supervise.roll import Roll
from relax_hpc.supervise.supervisor import RELEASED


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
    Ledger(run).add(Entry("7", "group", "actor"))
    allocation = Allocation("7", 0, "node1", {"actor": Place("7", 2, None)})
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
    supervisor = SimpleNamespace(roll=Roll(job.run, job.config, ["actor"]), interrupted=0, terminal=terminal)
    job.tick(supervisor)
    return supervisor


def released(job: GroupJob) -> set[str]:
    """Groups that the job's supervisor gives away at its next round."""
    return ticked(job).roll.released


def test_another_job_takes_the_group_and_this_one_ends(job: GroupJob, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_where_nodes_may_not_submit_it_is_queued_again(job: GroupJob, monkeypatch: pytest.MonkeyPatch) -> None:
    submitting(monkeypatch, "8")
    job.config.site.sbatch_on_nodes = False
    # In this layout a held job belongs to the command `resubmit`.
    job.ledger.add(Entry("9", "spare", "actor"))
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
        describe=lambda job: {"JobState": "COMPLETING", "Reason": "None", "Restarts": "0", "ExitCode": "0:0"}
    )
    allocation = Allocation("7", 0, "node1", {group: Place("7", 1, None)})
    GroupJob(run, Config(layout="jobs"), slurm, allocation, "node1").interrupted()
    assert bool(asked_to_stop(run)) == stops


def test_a_job_whose_group_was_given_to_another_one_gives_way(job: GroupJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.ledger.add(Entry("8", "group", "actor"))
    monkeypatch.setattr(jobs, "_ASK_SLURM_S", 0.0)
    assert released(job) == {"actor"}


@pytest.mark.parametrize("told", [True, False], ids=["told", "found out"])
def test_a_job_that_gives_way_saves_first_and_does_not_come_back(job: GroupJob, told: bool) -> None:
    assert not ticked(job).interrupted
    if told:
        job.ledger.give_way("7")
    else:
        job.bereft = SimpleNamespace(look=lambda _: True)
    supervisor = ticked(job)
    assert supervisor.interrupted == 1 and not supervisor.roll.released, "a group that is released would be killed"
    assert job.ledger.gave_way("7")
    job.end(EXIT_RETRY)
    assert job.slurm.requeued == []
