"""Commands that show a run: status, logs and list, with files as roles leave them and a fake
Slurm."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_NO_PROGRESS
from relax_hpc.base.log_rotation import rotate_log
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise import requests
from relax_hpc.commands.program import main
from relax_hpc.config import Config
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.life_signs import write_activity
from relax_hpc.ops.observe import listing, logs
from relax_hpc.ops.observe.status import status
from relax_hpc.ops.observe.status_view import lines
from tests.helpers.command_helpers import (  # noqa: F401
    GROUPS,
    begin,
    in_thread,
    make_run,
    short_waits,
    slurm_fixture,
    submitted,
    until,
)
from tests.helpers.fake_slurm import FakeSlurm

# -- status ----------------------------------------------------------------------------------------


def states(run: RunDir) -> dict[str, str]:
    run_status = status(run, 0.05, Slurm(30.0, 1))
    json.dumps(run_status)
    assert len(list(lines(run_status))) >= 6
    return {name: group["state"] for name, group in run_status["groups"].items()}


def test_states_of_groups(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path / "run")
    assert set(states(run).values()) == {"absent"} and status(run, 0.05)["state"] == "ended"
    submitted(run, slurm, rollout="PENDING")
    assert states(run) == {
        "hub": "running",
        "rollout": "queued",
        "actor": "running",
        "actor_fwd": "running",
    }
    incarnation = begin(run, "actor", "13")
    write_exit_mark(run.exit_mark("actor", incarnation, "actor"), 75, "out of luck")
    assert states(run)["actor"] == "restarting"
    jobs = slurm.state["jobs"]
    slurm.set(jobs={job: fields for job, fields in jobs.items() if job != "13"})
    assert states(run)["actor"] == "ended"
    slurm.set(jobs=jobs)
    begin(run, "actor", "13", beat_age_s=None)
    assert states(run)["actor"] == "starting"
    for age, state in ((5.8, "suspect"), (20.0, "dead")):
        begin(run, "actor_fwd", "14", beat_age_s=age)
        assert states(run)["actor_fwd"] == state
    write_exit_mark(run.exit_mark("hub", 1, "advantages"))
    write_exit_mark(run.exit_mark("hub", 1, "api"))
    assert states(run)["hub"] == "done"


def test_status_tells_of_queue_places_and_results(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    Ledger(run).add(Submission("99", "group", "rollout-2", attempt=1))
    queued = {"state": "PENDING", "reason": "Resources", "left": "1-00:00:00"}
    slurm.set(jobs=slurm.state["jobs"] | {"99": queued})
    saved = run.checkpoints / "i000001-step-000004"
    saved.mkdir()
    (run.checkpoints / "i000001-step-000008").mkdir()
    (saved / "COMPLETE.json").touch()
    time_of = {
        "idle/actor": 0.5,
        "idle/actor_for_rollout": 0.4,
        "perf/actor_wait_s": 1,
        "perf/actor_train_s": 1,
    }
    rows = [
        {"step": n, "time": 100.0 + 2 * n, "incarnation": 1, "reward/mean": 0.5} | time_of
        for n in range(5)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_status = status(run, 0.05, Slurm(30.0, 1))
    assert (run_status["trained_steps"], run_status["steps"], run_status["eta_s"]) == (5, 10, 10.0)
    assert (
        run_status["checkpoint"]["step"] == 4
        and run_status["state"] == "running"
        and not run_status["hub"]
    )
    member, rollout = run_status["groups"]["rollout-2"], run_status["groups"]["rollout"]
    assert (member["state"], member["reason"], member["job"], member["incarnation"]) == (
        "queued",
        "Resources",
        "99",
        0,
    )
    assert (rollout["nodes"], rollout["time_left_s"], rollout["puts"]) == ("node[1-2]", 600.0, 7)
    text = "\n".join(lines(run_status))
    assert run_status["shares"]["roles"] == {
        "actor": {"at": {"wait": 0.5, "train": 0.5}, "for": {"rollout": 0.4}}
    }
    shares = "  actor       train 50%  waits for rollout 40%  waits 10%"
    assert f"time of the last 5 steps:\n{shares}" in text
    assert (
        "queued (Resources)" in text
        and "step 5/10  eta 10s" in text
        and "no answer from the hub" in text
    )
    assert len(slurm.calls("squeue")) == 1


def test_status_does_without_slurm_and_after_the_end(
    tmp_path: Path, slurm: FakeSlurm, capsys: Any
) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    slurm.answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert "no answer from the hub and squeue" in "\n".join(lines(status(run, 0.05, Slurm(2.0, 1))))
    requests.request_stop(run, 93, "in circles")
    for name in GROUPS:
        begin(run, name, beat_age_s=60.0)
    assert main(["status", str(run.root), "--watch", "2", "--json"]) == EXIT_NO_PROGRESS
    assert json.loads(capsys.readouterr().out)["state"] == "failed"
    write_json(run.finished, {"steps": 10, "dropped": {"stale_version": 3}})
    assert main(["status", str(run.root)]) == 0
    text = capsys.readouterr().out
    assert (
        f"{run.root}: finished" in text
        and "dropped: stale_version 3" in text
        and text.count("done") == 4
    )
    assert main(["status", str(run.root), "--watch", "0.5"]) == EXIT_CONFIG


# -- logs and list ---------------------------------------------------------------------------------


def test_logs(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    for text in ("old", "new"):
        incarnation = begin(run, "rollout")
        for name in ("rollout", "rollout-rank-0", "rollout-rank-1", "rollout-srun"):
            (run.logs("rollout", incarnation) / f"{name}.log").write_text(
                f"{name} {text} 1\n{name} {text} 2\n"
            )
    (run.root / "supervisor.log").write_text("started\n")
    of_run = ["logs", str(run.root)]
    assert main([*of_run, "-n", "1"]) == 0
    text = capsys.readouterr().out
    assert (
        "rollout/inc-000002/rollout-rank-1: rollout-rank-1 new 2\n" in text
        and "supervisor: started" in text
    )
    assert "old" not in text and "new 1" not in text
    assert main([*of_run, "--role", "rollout", "--rank", "1", "--incarnation", "1"]) == 0
    assert capsys.readouterr().out == "rollout-rank-1 old 1\nrollout-rank-1 old 2\n"
    assert (
        main([*of_run, "--group", "actor"]) == EXIT_CONFIG
        and "no selected log exists" in capsys.readouterr().err
    )


def test_logs_follow_new_lines_and_new_incarnations(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    first = run.logs("actor", begin(run, "actor")) / "actor.log"
    first.write_text("one\nhal")
    code: list[int] = []
    with in_thread(
        lambda: code.append(main(["logs", str(run.root), "--group", "actor", "--follow"]))
    ):
        printed = ""

        def is_printed(text: str) -> bool:
            nonlocal printed
            printed += capsys.readouterr().out
            return text in printed

        until(lambda: is_printed("one\n"))
        with first.open("a") as file:
            file.write("f\ntwo\n")
        until(lambda: is_printed("two\n"))
        (run.logs("actor", begin(run, "actor")) / "actor.log").write_text("three\n")
        until(lambda: is_printed("actor/inc-000002/actor: three\n"))
        write_json(run.finished, {})
    assert code == [0]


def test_a_log_that_leads_out_of_the_run_is_left_out(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    folder = run.logs("actor", begin(run, "actor"))
    (tmp_path / "secret").write_text("secret\n")
    (folder / "actor.log").symlink_to(tmp_path / "secret")
    (folder / "actor-rank-0.log").write_text("line\n")
    write_json(run.finished, {})
    assert main(["logs", str(run.root), "--follow"]) == 0
    text = capsys.readouterr().out
    assert "line\n" in text and text.count("skipped: ") == 1 and "secret\n" not in text


def test_logs_show_each_line_once_though_files_are_cut(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    log = run.logs("actor", begin(run, "actor")) / "actor-rank-0.log"

    def write(*names: str, cut: bool = True) -> None:
        with log.open("ab") as file:
            file.writelines(f"{name}\n".encode() for name in names)
        assert rotate_log(log, 1) if cut else True

    write("a", "b")
    write("c", "d")
    write("e", "f", cut=False)
    tail = logs.Tail(log, "")
    assert tail.last_lines(5) == ["b", "c", "d", "e", "f"] and tail.new_lines() == []
    write("g")
    write("h")
    write("i", cut=False)
    assert tail.new_lines() == ["g", "h", "i"] and tail.new_lines() == []
    write("j")
    assert tail.new_lines() == ["j"], "the file is empty now"
    of_run = ["logs", str(run.root), "--group", "actor"]
    assert main([*of_run, "-n", "3"]) == 0 and capsys.readouterr().out.split() == ["h", "i", "j"]


def test_list(
    tmp_path: Path, slurm: FakeSlurm, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {name: make_run(tmp_path / "runs" / "deep" / name) for name in ("a", "b", "c", "d", "e")}
    submitted(runs["a"], slurm)
    requests.request_stop(runs["b"], 93, "in circles")
    write_json(runs["c"].finished, {})
    Ledger(runs["d"]).add(Submission("77", "group", "hub"))
    slurm.set(jobs=slurm.state["jobs"] | {"77": {"state": "PENDING"}})
    runs["e"].config.write_text("nonsense: 1\n")
    assert main(["list", str(tmp_path / "runs"), "--json"]) == EXIT_NO_PROGRESS
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    kinds = {"a": "running", "b": "failed", "c": "finished", "d": "queued", "e": "unreadable"}
    assert {name: row["state"] for name, row in rows.items()} == {
        f"deep/{k}": v for k, v in kinds.items()
    }
    assert rows["deep/a"]["jobs"] == ["11", "12", "13", "14"] and len(slurm.calls("squeue")) == 1
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == EXIT_NO_PROGRESS and capsys.readouterr().out.count("\n") == 6
    assert main(["list", "nowhere"]) == EXIT_CONFIG
    assert [path.name for path in listing.run_directories(runs["a"].root)] == ["a"]


def test_a_run_whose_jobs_may_not_be_read_does_not_end_the_list(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {name: make_run(tmp_path / "runs" / name) for name in ("closed", "open")}
    for run in runs.values():
        submitted(run, slurm)
    submitted_jobs = listing.submitted_jobs

    def refuse(run: RunDir, config: Config) -> list[str]:
        if run.root.name == "closed":
            raise PermissionError(errno.EACCES, "denied", str(run.submit))
        return submitted_jobs(run, config)

    monkeypatch.setattr(listing, "submitted_jobs", refuse)
    rows = {row["run"]: row for row in listing.runs(tmp_path / "runs")}
    assert {name: row["state"] for name, row in rows.items()} == {
        "closed": "unreadable",
        "open": "running",
    }
    assert str(runs["closed"].submit) in rows["closed"]["error"]


def test_a_run_that_is_removed_meanwhile_does_not_end_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kept", "removed"):
        make_run(tmp_path / name, "local")
    read_run = listing._read_run

    def remove_and_read(run: RunDir) -> object:
        if run.root.name == "removed":
            shutil.rmtree(run.root)
        return read_run(run)

    monkeypatch.setattr(listing, "_read_run", remove_and_read)
    states = {row["run"]: row["state"] for row in listing.runs(tmp_path)}
    assert states == {"kept": "ended", "removed": "unreadable"}


def test_what_groups_load_is_shown(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path / "run", "local")
    write_activity(run.preparing, "warm start of 80 steps")
    run_status = status(run, 0.05)
    assert run_status[
        "state"
    ] == "starting" and "preparing: warm start of 80 steps (0 s)" in "\n".join(lines(run_status))
    assert listing.runs(tmp_path)[0]["state"] == "starting"
    write_activity(run.preparing, "")
    begin(run, "rollout")
    beat = run.rendezvous("rollout") / "beat-rollout.json"
    write_json(
        beat, json.loads(beat.read_text()) | {"doing": "SGLang is loading weights", "doing_s": 75.0}
    )
    run_status = status(run, 0.05)
    assert (
        run_status["state"] == "running"
        and run_status["groups"]["rollout"]["doing"] == "SGLang is loading weights (75 s)"
    )
    assert re.search(
        r"^rollout +running .*SGLang is loading weights \(75 s\)$",
        "\n".join(lines(run_status)),
        re.M,
    )
