"""Commands that change a run: resubmit, scale and stop, with a fake Slurm and fake supervisors."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_RETRY
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.slurm.job_lookup import separate_job
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise import requests
from relax_hpc.commands import resubmit, stop
from relax_hpc.commands.program import main
from relax_hpc.service.address import ServiceAddress, publish_address
from tests.helpers.command_helpers import (  # noqa: F401
    Supervisors,
    begin,
    in_thread,
    make_run,
    short_waits,
    slurm_fixture,
    submitted,
    until,
    words,
)
from tests.helpers.fake_slurm import FakeSlurm

# -- resubmit and scale ----------------------------------------------------------------------------


def resubmitted(run: RunDir, *words: str) -> int:
    return main(["resubmit", str(run.root), "--group", "rollout", "--parsable", *words])


def test_resubmit_stops_the_old_job_and_queues_the_next(
    tmp_path: Path, slurm: FakeSlurm, capsys: Any
) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    with Supervisors(run, slurm) as supervisors:
        assert resubmitted(run, "--nodes", "4", "--rollout.temperature", "0.5") == 0
    captured = capsys.readouterr()
    assert captured.out == "100\n" and "stopped in job 12" in captured.err
    assert supervisors.seen == [("release", "rollout")]
    [argv] = words(slurm, "sbatch")
    assert {"--hold", "--dependency=afterany:12"} <= set(argv) and ["release", "100"] in words(
        slurm, "scontrol"
    )
    assert argv[-1] == str(run.submit / "rollout.sbatch")
    assert "#SBATCH --nodes=4" in (run.submit / "rollout.sbatch").read_text()
    newest = Ledger(run).separate_job("rollout")
    assert newest is not None and newest.job == "100" and not words(slurm, "scancel")


def test_resubmit_of_a_queued_or_lost_job_needs_no_supervisor(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    for state, cancelled in (("PENDING", [["12"]]), ("", [])):
        run = make_run(tmp_path / f"run{state}")
        slurm.set(jobs={})
        submitted(run, slurm, rollout=state)
        before = words(slurm, "scancel")
        assert resubmitted(run) == 0
        assert words(slurm, "scancel") == [*before, *cancelled]
        assert not any("dependency" in state for state in words(slurm, "sbatch")[-1])


def test_resubmit_takes_its_job_back_while_the_old_group_may_live(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    monkeypatch.setattr(resubmit, "ANSWER_S", 0.1)
    assert resubmitted(run) == EXIT_RETRY
    assert "release rollout: no supervisor has answered" in capsys.readouterr().err
    with Supervisors(run, error="not now"):
        assert resubmitted(run) == EXIT_RETRY
    assert "the supervisor says: not now" in capsys.readouterr().err
    assert words(slurm, "scancel") == [["100"], ["101"]] and separate_job(run, "rollout") == "12"


def test_nothing_is_stopped_for_a_job_that_slurm_does_not_take(
    tmp_path: Path, slurm: FakeSlurm, capsys: Any
) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    slurm.answer("sbatch", err="sbatch: error: More processors requested than permitted", code=1)
    assert resubmitted(run) == EXIT_RETRY and "More processors" in capsys.readouterr().err
    assert not (run.root / "requests").exists()


def test_a_released_job_that_stays_is_ended(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    with Supervisors(run):
        assert resubmitted(run) == 0
    assert words(slurm, "scancel") == [["12"]]


def test_resubmit_in_place(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
    for layout, options in (("local", []), ("het", []), ("jobs", ["--in-place"])):
        run = make_run(tmp_path / layout, layout)
        begin(run, "rollout", "" if layout == "local" else "9")
        with Supervisors(run) as supervisors:
            assert resubmitted(run, *options, "--rollout.temperature", "0.9") == 0
        assert supervisors.seen == [("restart", "rollout")] and not slurm.calls("sbatch")
    assert capsys.readouterr().out == ""


def test_a_het_group_leaves_its_component(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "het")
    Ledger(run).add(Submission("9", "group", "rollout"))  # of an earlier submission
    Ledger(run).add(Submission("10", "run", attempt=1))
    begin(run, "rollout", "11")
    component = {"state": "RUNNING", "het": "10+1", "name": "rollout"}
    slurm.set(jobs={"10": {"state": "RUNNING", "het": "10+0"}, "11": component})
    with Supervisors(run) as supervisors:
        assert resubmitted(run, "--nodes", "1") == 0
    assert supervisors.seen == [("release", "rollout")]
    assert not any("dependency" in option for option in words(slurm, "sbatch")[0])
    assert main(["resubmit", str(run.root), "--group", "hub", "--nodes", "3"]) == EXIT_CONFIG
    assert "is in component 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--nodes", "3"],
            "rollout.replicas: found 4, allowed: a multiple of groups.rollout.resources.nodes, 3",
        ),
        (["--actor.optimizer.lr", "1"], "does not belong to group rollout alone"),
        (["--nodes", "2", "--in-place"], "--in-place: found with --nodes"),
        (["--rollout.reward", "nonsense"], "rollout.reward"),
        (["--stepz", "1"], "--stepz: unknown option"),
    ],
)
def test_wrong_changes_are_refused_before_anything_is_stopped(
    tmp_path: Path, slurm: FakeSlurm, capsys: Any, argv: list[str], message: str
) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    assert resubmitted(run, *argv) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (run.root / "changes").exists() and not (run.root / "requests").exists()


def test_commands_need_a_run_that_goes_on(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run")
    for argv in (["resubmit", "--group", "rollout"], ["scale", "--replicas", "2"]):
        assert (
            main([*argv, str(tmp_path)]) == EXIT_CONFIG and "no run here" in capsys.readouterr().err
        )
    requests.request_stop(run)
    assert resubmitted(run) == EXIT_CONFIG
    assert f"resume with: relax-hpc run --run_dir {run.root} --resume" in capsys.readouterr().err
    write_json(run.finished, {})
    assert resubmitted(run) == EXIT_CONFIG and "is finished" in capsys.readouterr().err
    assert (
        main(["resubmit", str(run.root)]) == EXIT_CONFIG
        and "--group: found nothing" in capsys.readouterr().err
    )


def test_scale_is_a_client_of_the_service(tmp_path: Path, capsys: Any) -> None:
    """Its operations are tested in tests/runs/test_elastic_run.py and tests/cluster/test_elastic.py."""
    run = make_run(tmp_path / "run", "local")
    for argv, message in (
        (["--group", "actor", "--replicas", "2"], "--group: found 'actor', allowed: rollout"),
        (["--replicas", "0"], "--replicas: found 0, allowed: at least 1"),
        ([], "--replicas: found nothing"),
        (["--replicas", "2", "--time", "5"], "--time, --time-min: options of Slurm jobs"),
        (["--without", "x"], "--without: found 'x'"),
    ):
        assert (
            main(["scale", str(run.root), *argv]) == EXIT_CONFIG
            and message in capsys.readouterr().err
        )
    for address in (None, ServiceAddress(1, socket.gethostname(), "http://127.0.0.1:9", "token")):
        if address:
            publish_address(run, address)
        assert main(["scale", str(run.root), "--replicas", "2"]) == EXIT_RETRY
        captured = capsys.readouterr().err
        assert "see relax-hpc status" in captured and "hub" in captured and "token" not in captured


# -- stop ------------------------------------------------------------------------------------------


def test_stop_withdraws_first_and_waits(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm, actor_fwd="PENDING")
    for job, kind in (("50", "successor"), ("51", "spare")):
        Ledger(run).add(Submission(job, kind, attempt=1))
        slurm.set(jobs=slurm.state["jobs"] | {job: {"state": "PENDING"}})

    def supervisors() -> None:
        until(lambda: run.stop.exists() and not {"14", "50", "51"} & slurm.state["jobs"].keys())
        slurm.set(jobs={})

    with in_thread(supervisors):
        assert main(["stop", str(run.root)]) == 0
    assert words(slurm, "scancel") == [["50"], ["51"], ["14"]]
    captured = capsys.readouterr()
    assert "stopped: no checkpoint was made" in captured.out and "submit --run_dir" in captured.out


@pytest.mark.parametrize("now", [[], ["--now"]])
def test_stop_ends_what_does_not_end_by_itself(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, now: list[str]
) -> None:
    monkeypatch.setattr(stop, "_MARGIN_S", 0.3)
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    assert main(["stop", str(run.root), *now]) == 0
    assert words(slurm, "scancel") == [["11"], ["12"], ["13"], ["14"]] and not slurm.state["jobs"]


def test_a_run_is_asked_to_stop_while_slurm_is_away(
    tmp_path: Path, slurm: FakeSlurm, capsys: Any
) -> None:
    """Its hub can save and end it without Slurm."""
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    slurm.answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert main(["stop", str(run.root)]) == EXIT_RETRY
    assert requests.read_stop_request(run)["reason"] == "asked to stop"
    assert "asked to stop, and saves; call stop again" in capsys.readouterr().err


def test_stop_of_what_does_not_run(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    assert (
        main(["stop", str(run.root)]) == 0
        and "has no process on this machine" in capsys.readouterr().err
    )
    assert not run.stop.exists()
    write_json(run.finished, {})
    assert main(["stop", str(run.root)]) == 0 and "finished already" in capsys.readouterr().err


def test_a_run_with_jobs_is_not_submitted_twice(
    tmp_path: Path, slurm: FakeSlurm, capsys: Any
) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm, hub="PENDING", rollout="", actor="", actor_fwd="")
    assert main(["submit", "--resume", "--run_dir", str(run.root)]) == EXIT_CONFIG
    assert "has jobs in the queue (11)" in capsys.readouterr().err and not slurm.calls("sbatch")
