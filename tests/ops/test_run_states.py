"""State of a run: one table for `status` and `list`, whatever its processes, files and jobs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise import requests
from relax_hpc.commands.program import main
from relax_hpc.ops.observe import run_state
from relax_hpc.ops.observe.run_state import FINAL_STATES, RunSigns, decide_state, exit_code
from tests.helpers.command_helpers import begin, make_run
from tests.helpers.fake_slurm import FakeSlurm

STOPPED, FAILED = {"code": 0, "reason": "asked to stop"}, {"code": 93, "reason": "in circles"}
SLURM = {"submitted": True, "squeue_answers": True}
TABLE = [
    # Files alone.
    ({}, "ended", 75),
    ({"finished": True}, "finished", 0),
    ({"stop": STOPPED}, "stopped", 130),
    ({"stop": FAILED}, "failed", 93),
    ({"prepares": True}, "starting", 0),
    ({"beats": True}, "running", 0),
    ({"hub_answers": True}, "running", 0),
    ({"beats": True, "stop": STOPPED}, "stopping", 0),
    # Slurm answers.
    (SLURM, "ended", 75),
    (SLURM | {"beats": True}, "ended", 75),
    (SLURM | {"beats": True, "sees_all_jobs": False}, "running", 0),
    (SLURM | {"beats": True, "holds_nodes": True}, "running", 0),
    (SLURM | {"holds_nodes": True}, "starting", 0),
    (SLURM | {"holds_nodes": True, "disk_full": True}, "running", 0),
    (SLURM | {"queued": True}, "queued", 0),
    (SLURM | {"queued": True, "beats": True}, "queued", 0),
    (SLURM | {"queued": True, "jobs_end": True}, "queued", 0),
    (SLURM | {"queued": True, "stop": STOPPED}, "stopped", 130),
    (SLURM | {"jobs_end": True, "stop": STOPPED}, "stopping", 0),
    (SLURM | {"holds_nodes": True, "stop": FAILED}, "stopping", 0),
    (SLURM | {"jobs_end": True}, "stopping", 0),
    # Slurm does not answer.
    ({"submitted": True}, "unknown", 75),
    ({"submitted": True, "beats": True}, "running", 0),
    ({"submitted": True, "stop": FAILED}, "failed", 93),
    ({"submitted": True, "finished": True}, "finished", 0),
]


@pytest.mark.parametrize(("seen_signs", "state", "code"), TABLE)
def test_the_table_of_states(seen_signs: dict[str, Any], state: str, code: int) -> None:
    signs = RunSigns(**seen_signs)
    assert (decide_state(signs), exit_code(state, signs.stop)) == (state, code)


SIGNS = st.builds(
    RunSigns,
    stop=st.sampled_from([{}, STOPPED, FAILED]),
    **{
        name: st.booleans()
        for name, field in RunSigns.__dataclass_fields__.items()
        if field.type == "bool"
    },
)


@given(SIGNS)
def test_a_run_that_something_continues_has_not_ended(signs: RunSigns) -> None:
    state = decide_state(signs)
    continues = (
        signs.hub_answers
        or signs.holds_nodes
        or signs.jobs_end
        or (signs.queued and not signs.stop)
    )
    if continues and not signs.finished:
        assert state not in FINAL_STATES and exit_code(state, signs.stop) == 0
    assert (state == "finished") == signs.finished
    assert state != "running" or signs.is_working


# -- the two commands ------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


def say(run: RunDir, capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    """State and exit code of a run, which `status` and `list` agree on."""
    capsys.readouterr()
    codes = [main(["status", str(run.root), "--json"]), main(["list", str(run.root), "--json"])]
    shown, (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert codes == [shown["exit_code"]] * 2 == [row["exit_code"]] * 2
    assert shown["state"] == row["state"], (shown["state"], row["state"])
    return row["state"], row["exit_code"]


def test_a_run_with_a_queued_successor_has_not_ended(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", "het")
    Ledger(run).add(Submission("20", "run", attempt=1))
    Ledger(run).add(Submission("30", "successor", after="20", attempt=1))
    for name, component in (("hub", "20"), ("rollout", "21"), ("actor", "22"), ("actor_fwd", "23")):
        begin(run, name, component, beat_age_s=1000.0)
    successor = {"30": {"state": "PENDING", "reason": "Dependency"}}
    slurm.set(jobs=successor | {"20": {"state": "RUNNING", "het": "20+0"}})
    assert say(run, capsys) == ("starting", 0)
    slurm.set(jobs=successor)
    assert say(run, capsys) == ("queued", 0)
    assert main(["status", str(run.root)]) == 0
    shown = capsys.readouterr().out
    assert "queued (Dependency)" in shown and "left no mark" not in shown, shown
    # It waits for a job that has ended well, and never starts.
    slurm.set(jobs={"30": {"state": "PENDING", "reason": "DependencyNeverSatisfied"}})
    assert say(run, capsys) == ("ended", 75)
    slurm.set(jobs={})
    assert say(run, capsys) == ("ended", 75)
    slurm.answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert say(run, capsys) == ("unknown", 75)
    requests.request_stop(run)
    assert say(run, capsys) == ("stopped", 130)


def test_a_held_spare_continues_nothing(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", "het")
    Ledger(run).add(Submission("20", "run", attempt=1))
    Ledger(run).add(Submission("31", "spare", "actor", attempt=1))
    slurm.set(jobs={"31": {"state": "PENDING", "reason": "JobHeldUser"}})
    assert say(run, capsys) == ("ended", 75)
    Ledger(run).add(Submission("31", "group", "actor", attempt=1))
    assert say(run, capsys) == ("queued", 0)


def test_the_run_of_another_user_is_judged_by_its_jobs_ids(
    tmp_path: Path,
    slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(tmp_path / "run")
    Ledger(run).add(Submission("11", "group", "hub", attempt=1))
    begin(run, "hub", "11")
    slurm.set(jobs={"11": {"state": "RUNNING"}})
    assert say(run, capsys) == ("running", 0)
    assert not [call for call in slurm.calls("squeue") if "--me" in call["argv"]], (
        "its jobs are not mine"
    )
    # A site may show each user their own jobs alone.
    slurm.set(jobs={})
    assert say(run, capsys) == ("ended", 75)
    monkeypatch.setattr(run_state.os, "getuid", lambda: run.root.stat().st_uid + 1)
    assert say(run, capsys) == ("running", 0)
