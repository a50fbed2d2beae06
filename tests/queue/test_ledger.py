"""Which jobs were submitted for a run, and what for."""

from __future__ import annotations

from pathlib import Path

from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from tests.helpers.queue_helpers import make_run


def ledger_of(tmp_path: Path, *entries: Submission) -> Ledger:
    ledger = Ledger(make_run(tmp_path / "run"))
    for entry in entries:
        ledger.add(entry)
    return ledger


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    entries = [
        Submission("7", "run", attempt=1),
        Submission("10", "successor", after="7", attempt=1),
        Submission("9", "group", "actor"),
    ]
    ledger = ledger_of(tmp_path, *entries)
    assert ledger.entries() == entries
    assert Ledger(make_run(tmp_path / "other")).entries() == []


def test_the_newest_job_of_a_group_is_of_the_life_of_now(tmp_path: Path) -> None:
    ledger = ledger_of(
        tmp_path,
        Submission("7", "run"),
        Submission("8", "group", "actor"),
        Submission("9", "group", "actor"),
    )
    assert ledger.separate_job("actor").job == "9" and ledger.separate_job("rollout") is None
    ledger.add(Submission("20", "run"))
    assert ledger.separate_job("actor") is None, "the whole run was submitted again"
    assert (
        ledger_of(tmp_path / "jobs", Submission("1", "group", "actor")).separate_job("actor").job
        == "1"
    )


def test_a_job_that_gave_way_has_its_group_no_more(tmp_path: Path) -> None:
    ledger = ledger_of(
        tmp_path,
        Submission("7", "run"),
        Submission("8", "group", "actor"),
        Submission("9", "group", "actor"),
    )
    ledger.mark_retired("8")
    assert (
        ledger.separate_job("actor").job == "9"
        and ledger.superseded("8", "actor")
        and not ledger.superseded("9", "actor")
    )
    ledger.mark_retired("9")
    assert ledger.separate_job("actor") is None, (
        "the job of the whole run has it, not the one before"
    )
    assert ledger.last_separate_job("actor").job == "9" and ledger.superseded("9", "actor"), (
        "should Slurm start it again"
    )


def test_successors_are_those_of_one_attempt(tmp_path: Path) -> None:
    old, new = (
        Submission("8", "successor", after="7", attempt=1),
        Submission("21", "successor", after="20", attempt=2),
    )
    ledger = ledger_of(
        tmp_path, Submission("7", "run", attempt=1), old, Submission("20", "run", attempt=2), new
    )
    assert (ledger.successors(1), ledger.successors(2), ledger.successors(3)) == ([old], [new], [])


def test_a_spare_is_used_once(tmp_path: Path) -> None:
    spares = [
        Submission("8", "spare", "actor"),
        Submission("9", "spare", "rollout"),
        Submission("10", "spare", "rollout"),
    ]
    ledger = ledger_of(
        tmp_path, Submission("7", "run"), *spares, Submission("9", "group", "rollout")
    )
    assert [entry.job for entry in ledger.spares()] == ["8", "10"]
    assert [entry.job for entry in ledger.spares("rollout")] == ["10"]
