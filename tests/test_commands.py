"""The user's commands on a run, with files as roles leave them, a Slurm that is made up and supervisors of the test."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.cli.program import main
from relax_hpc.config import dump, load, load_resolved
from relax_hpc.config.groups import roles_of
from relax_hpc.errors import EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_RETRY
from relax_hpc.lifecycle import resubmit, stop
from relax_hpc.observe import listing, logs
from relax_hpc.observe.status import status
from relax_hpc.observe.status_view import lines
from relax_hpc.parts import cut_log
from relax_hpc.rendezvous import signs
from relax_hpc.rendezvous.exit_mark import leave_mark
from relax_hpc.rendezvous.roster import Card, claim_incarnation, publish_card
from relax_hpc.rendezvous.signs import identity, say
from relax_hpc.rundir import RunDir, write_json
from relax_hpc.slurm.commands import Slurm
from relax_hpc.slurm.job_lookup import own_job
from relax_hpc.slurm.submissions import Entry, Ledger
from relax_hpc.supervise import requests
from relax_hpc.supervise.launch_records import Launch, record
from relax_hpc.supervise.requests import Request
from tests.fake_slurm import FakeSlurm

DEADLINE_S = 120.0
GROUPS = ("hub", "rollout", "actor", "actor_fwd")
LIMITS = {"beat_s": 0.1, "lease_s": 4.0, "stop_timeout_s": 0.1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and deadlines of tests."""
    monkeypatch.setattr(requests, "LOOK_S", 0.01)
    for name, value in {"ANSWER_S": 3.0, "LOOK_S": 0.02, "GRACE_S": 0.2}.items():
        monkeypatch.setattr(resubmit, name, value)
    monkeypatch.setattr(stop, "_LOOK_S", 0.02)
    monkeypatch.setattr(stop, "_MARGIN_S", 2.0)
    monkeypatch.setattr(logs, "_LOOK_S", 0.01)
    monkeypatch.setattr(logs, "_QUIET_S", 0.1)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


def make_run(path: Path, layout: str = "jobs") -> RunDir:
    """A run directory as `submit` makes it."""
    run = RunDir(path)
    nodes = {f"groups.{name}.resources.nodes": 2 for name in ("hub", "rollout") if layout != "local"}
    over = {"layout": layout, "run_dir": str(run.root), "groups.reference": None, "rollout.replicas": 4, **nodes}
    over |= {"data.task": "sort_digits", "liveness": LIMITS, "steps": 10, "groups.actor_fwd": {}}
    over |= {"rollout.max_new_tokens": 5, "data.max_prompt_tokens": 32}
    run.create()
    dump(load([], over), run.config)
    return run


def begin(run: RunDir, name: str, job: str = "", beat_age_s: float | None = 0.0) -> int:
    """An incarnation of a group, with a beat that is so old; its incarnation."""
    incarnation = claim_incarnation(run, name)
    record(run, name, incarnation, Launch(1, (0, 0, 0), job))
    publish_card(run, Card(name, incarnation, [{"pid": 1, "node": "node1"}]))
    if beat_age_s is not None:
        beat = {
            "time": time.time() - beat_age_s,
            "incarnation": incarnation,
            "progress": 7,
            "busy_s": 0.1,
            "gap_s": 0.3,
        }
        write_json(run.rendezvous(name) / f"beat-{name}.json", beat)
    run.logs(name, incarnation).mkdir(parents=True)
    return incarnation


def submitted(run: RunDir, slurm: FakeSlurm, **states: str) -> None:
    """One job a group, in these states (RUNNING if not said, "" for gone), and the groups that run in them."""
    jobs = slurm.state["jobs"]
    for number, name in enumerate(GROUPS, start=11):
        state = states.get(name, "RUNNING")
        Ledger(run).add(Entry(str(number), "group", name, attempt=1))
        if state:
            jobs[str(number)] = {"state": state, "nodes": 2, "node_list": "node[1-2]", "name": name}
        if state == "RUNNING":
            begin(run, name, str(number))
    slurm.set(jobs=jobs)


class Supervisors:
    """Answers requests of a run as its supervisors would; `seen` is what was asked."""

    def __init__(self, run: RunDir, slurm: FakeSlurm | None = None, **answer: Any) -> None:
        self.run, self.slurm, self.content = run, slurm, answer or {"done": True}
        self.seen: list[tuple[str, str]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Supervisors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _serve(self) -> None:
        answered: set[Path] = set()
        while not self._end.wait(0.01):
            for path in sorted((self.run.root / "requests").glob("[0-9]*.json")):
                if path not in answered and "answer" not in path.name:
                    answered.add(path)
                    value = json.loads(path.read_text())
                    self.seen.append((value["op"], value["group"]))
                    self._end_job(value)
                    request = Request(int(path.name[:6]), value["op"], value["group"])
                    requests.answer(self.run, request, **self.content)

    def _end_job(self, value: dict[str, str]) -> None:
        if self.slurm and value["op"] == "release":
            entry = Ledger(self.run).newest(value["group"])
            jobs = self.slurm.state["jobs"]
            jobs.pop(entry.job if entry else "", None)
            self.slurm.set(jobs=jobs)


def words(slurm: FakeSlurm, program: str) -> list[list[str]]:
    return [call["argv"] for call in slurm.calls(program)]


# -- status ------------------------------------------------------------------------------------------------------------


def states(run: RunDir) -> dict[str, str]:
    found = status(run, 0.05, Slurm(30.0, 1))
    json.dumps(found)
    assert len(list(lines(found))) >= 6
    return {name: group["state"] for name, group in found["groups"].items()}


def test_states_of_groups(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path / "run")
    assert set(states(run).values()) == {"absent"} and status(run, 0.05)["state"] == "ended"
    submitted(run, slurm, rollout="PENDING")
    assert states(run) == {"hub": "running", "rollout": "queued", "actor": "running", "actor_fwd": "running"}
    incarnation = begin(run, "actor", "13")
    leave_mark(run.exit_mark("actor", incarnation, "actor"), 75, "out of luck")
    assert states(run)["actor"] == "restarting"
    jobs = slurm.state["jobs"]
    slurm.set(jobs={job: about for job, about in jobs.items() if job != "13"})
    assert states(run)["actor"] == "ended"
    slurm.set(jobs=jobs)
    begin(run, "actor", "13", beat_age_s=None)
    assert states(run)["actor"] == "starting"
    for age, word in ((5.8, "suspect"), (20.0, "dead")):
        begin(run, "actor_fwd", "14", beat_age_s=age)
        assert states(run)["actor_fwd"] == word
    leave_mark(run.exit_mark("hub", 1, "advantages"))
    assert states(run)["hub"] == "done"


def test_status_tells_of_queue_places_and_results(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    Ledger(run).add(Entry("99", "group", "rollout-2", attempt=1))
    queued = {"state": "PENDING", "reason": "Resources", "left": "1-00:00:00"}
    slurm.set(jobs=slurm.state["jobs"] | {"99": queued})
    saved = run.checkpoints / "i000001-step-000004"
    saved.mkdir()
    (run.checkpoints / "i000001-step-000008").mkdir()
    (saved / "COMPLETE.json").touch()
    time_of = {"idle/actor": 0.5, "idle/actor_for_rollout": 0.4, "perf/actor_wait_s": 1, "perf/actor_train_s": 1}
    rows = [{"step": n, "time": 100.0 + 2 * n, "incarnation": 1, "reward/mean": 0.5} | time_of for n in range(5)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = status(run, 0.05, Slurm(30.0, 1))
    assert (found["trained_steps"], found["steps"], found["eta_s"]) == (5, 10, 10.0)
    assert found["checkpoint"]["step"] == 4 and found["state"] == "running" and not found["hub"]
    member, rollout = found["groups"]["rollout-2"], found["groups"]["rollout"]
    assert (member["state"], member["reason"], member["job"], member["incarnation"]) == ("queued", "Resources", "99", 0)
    assert (rollout["nodes"], rollout["time_left_s"], rollout["puts"]) == ("node[1-2]", 600.0, 7)
    text = "\n".join(lines(found))
    assert found["shares"]["roles"] == {"actor": {"at": {"wait": 0.5, "train": 0.5}, "for": {"rollout": 0.4}}}
    shares = "  actor       train 50%  waits for rollout 40%  waits 10%"
    assert f"time of the last 5 steps:\n{shares}" in text
    assert "queued (Resources)" in text and "step 5/10  eta 10s" in text and "no answer from the hub" in text
    assert len(slurm.calls("squeue")) == 1


def test_status_does_without_slurm_and_after_the_end(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    slurm.answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert "no answer from the hub and squeue" in "\n".join(lines(status(run, 0.05, Slurm(2.0, 1))))
    requests.ask_to_stop(run, 93, "in circles")
    for name in GROUPS:
        begin(run, name, beat_age_s=60.0)
    assert main(["status", str(run.root), "--watch", "2", "--json"]) == EXIT_NO_PROGRESS
    assert json.loads(capsys.readouterr().out)["state"] == "failed"
    write_json(run.finished, {"steps": 10, "dropped": {"stale_version": 3}})
    assert main(["status", str(run.root)]) == 0
    text = capsys.readouterr().out
    assert f"{run.root}: finished" in text and "dropped: stale_version 3" in text and text.count("done") == 4
    assert main(["status", str(run.root), "--watch", "0.5"]) == EXIT_CONFIG


# -- resubmit and scale ------------------------------------------------------------------------------------------------


def resubmitted(run: RunDir, *words: str) -> int:
    return main(["resubmit", str(run.root), "--group", "rollout", "--parsable", *words])


def test_resubmit_stops_the_old_job_and_queues_the_next(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    with Supervisors(run, slurm) as supervisors:
        assert resubmitted(run, "--nodes", "4", "--rollout.temperature", "0.5") == 0
    captured = capsys.readouterr()
    assert captured.out == "100\n" and "stopped in job 12" in captured.err
    assert supervisors.seen == [("release", "rollout")]
    [argv] = words(slurm, "sbatch")
    assert {"--hold", "--dependency=afterany:12"} <= set(argv) and ["release", "100"] in words(slurm, "scontrol")
    assert argv[-1] == str(run.submit / "rollout.sbatch")
    assert "#SBATCH --nodes=4" in (run.submit / "rollout.sbatch").read_text()
    newest = Ledger(run).newest("rollout")
    assert newest is not None and newest.job == "100" and not words(slurm, "scancel")


def test_resubmit_of_a_queued_or_lost_job_needs_no_supervisor(tmp_path: Path, slurm: FakeSlurm) -> None:
    for state, cancelled in (("PENDING", [["12"]]), ("", [])):
        run = make_run(tmp_path / f"run{state}")
        slurm.set(jobs={})
        submitted(run, slurm, rollout=state)
        before = words(slurm, "scancel")
        assert resubmitted(run) == 0
        assert words(slurm, "scancel") == [*before, *cancelled]
        assert not any("dependency" in word for word in words(slurm, "sbatch")[-1])


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
    assert words(slurm, "scancel") == [["100"], ["101"]] and own_job(run, "rollout") == "12"


def test_nothing_is_stopped_for_a_job_that_slurm_does_not_take(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
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
    Ledger(run).add(Entry("9", "group", "rollout"))  # of an earlier submission
    Ledger(run).add(Entry("10", "run", attempt=1))
    begin(run, "rollout", "11")
    component = {"state": "RUNNING", "het": "10+1", "name": "rollout"}
    slurm.set(jobs={"10": {"state": "RUNNING", "het": "10+0"}, "11": component})
    with Supervisors(run) as supervisors:
        assert resubmitted(run, "--nodes", "1") == 0
    assert supervisors.seen == [("release", "rollout")]
    assert not any("dependency" in word for word in words(slurm, "sbatch")[0])
    assert main(["resubmit", str(run.root), "--group", "hub", "--nodes", "3"]) == EXIT_CONFIG
    assert "lives in component 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nodes", "3"], "rollout.replicas: found 4, allowed: a multiple of groups.rollout.resources.nodes, 3"),
        (["--actor.optimizer.lr", "1"], "not of group rollout alone"),
        (["--nodes", "2", "--in-place"], "--in-place: found with --nodes"),
        (["--rollout.reward", "nonsense"], "rollout.reward"),
        (["--stepz", "1"], "--stepz: unknown option"),
    ],
)
def test_wrong_changes_are_refused_before_anything_is_stopped(
    tmp_path: Path, slurm: FakeSlurm, capsys: Any, argv: list[str], said: str
) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    assert resubmitted(run, *argv) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (run.root / "changes").exists() and not (run.root / "requests").exists()


def test_commands_need_a_run_that_goes_on(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run")
    for argv in (["resubmit", "--group", "rollout"], ["scale", "--replicas", "2"]):
        assert main([*argv, str(tmp_path)]) == EXIT_CONFIG and "no run here" in capsys.readouterr().err
    requests.ask_to_stop(run)
    assert resubmitted(run) == EXIT_CONFIG
    assert f"go on with: relax-hpc run --run_dir {run.root} --resume" in capsys.readouterr().err
    write_json(run.finished, {})
    assert resubmitted(run) == EXIT_CONFIG and "is finished" in capsys.readouterr().err
    assert main(["resubmit", str(run.root)]) == EXIT_CONFIG and "--group: found nothing" in capsys.readouterr().err


def test_scale_out_and_in(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    scale = ["scale", str(run.root), "--parsable", "--replicas"]
    assert main([*scale, "4", "--time", "1:00:00", "--time-min", "10"]) == 0
    assert capsys.readouterr().out == "100\n101\n102\n"
    assert [argv[-1].rpartition("/")[2] for argv in words(slurm, "sbatch")] == [
        f"rollout-{n}.sbatch" for n in (2, 3, 4)
    ]
    assert all({"--time=1:00:00", "--time-min=10"} <= set(argv) for argv in words(slurm, "sbatch"))
    assert "--group rollout-3" in (run.submit / "rollout-3.sbatch").read_text()
    assert main([*scale, "4"]) == 0 and capsys.readouterr().out == ""
    jobs = slurm.state["jobs"]
    for number in (2, 3):
        begin(run, f"rollout-{number}", str(98 + number))
        jobs[str(98 + number)]["state"] = "RUNNING"
    slurm.set(jobs=jobs)
    with Supervisors(run, slurm) as supervisors:
        assert main([*scale, "1"]) == 0
    assert supervisors.seen == [("release", "rollout-3"), ("release", "rollout-2")]
    assert words(slurm, "scancel") == [["102"]]  # it had not started
    assert set(slurm.state["jobs"]) == {"11", "12", "13", "14"}


def test_scale_of_processes_and_mistakes(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    begin(run, "rollout-3")
    with Supervisors(run) as supervisors:
        assert main(["scale", str(run.root), "--replicas", "2"]) == 0
    assert supervisors.seen == [("release", "rollout-3"), ("start", "rollout-2")]
    capsys.readouterr()
    for argv, said in (
        (["--group", "actor", "--replicas", "2"], "--group: found 'actor', allowed: rollout"),
        (["--replicas", "0"], "--replicas: found 0, allowed: at least 1"),
        ([], "--replicas: found nothing"),
        (["--replicas", "2", "--time", "5"], "--time, --time-min: of Slurm jobs"),
    ):
        assert main(["scale", str(run.root), *argv]) == EXIT_CONFIG and said in capsys.readouterr().err


# -- stop --------------------------------------------------------------------------------------------------------------


def test_stop_withdraws_first_and_waits(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm, actor_fwd="PENDING")
    for job, kind in (("50", "successor"), ("51", "spare")):
        Ledger(run).add(Entry(job, kind, attempt=1))
        slurm.set(jobs=slurm.state["jobs"] | {job: {"state": "PENDING"}})

    def supervisors() -> None:
        until(lambda: run.stop.exists() and not {"14", "50", "51"} & slurm.state["jobs"].keys())
        slurm.set(jobs={})

    with helper(supervisors):
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


def test_a_run_is_asked_to_stop_while_slurm_is_away(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
    """Its hub can save and end it without Slurm."""
    run = make_run(tmp_path / "run")
    submitted(run, slurm)
    slurm.answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert main(["stop", str(run.root)]) == EXIT_RETRY
    assert requests.asked_to_stop(run)["reason"] == "asked to stop"
    assert "asked to stop, and saves; call stop again" in capsys.readouterr().err


def test_stop_of_what_does_not_run(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    assert main(["stop", str(run.root)]) == 0 and "nothing of it runs" in capsys.readouterr().err
    assert not run.stop.exists()
    write_json(run.finished, {})
    assert main(["stop", str(run.root)]) == 0 and "finished already" in capsys.readouterr().err


def test_a_run_with_jobs_is_not_submitted_twice(tmp_path: Path, slurm: FakeSlurm, capsys: Any) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, slurm, hub="PENDING", rollout="", actor="", actor_fwd="")
    assert main(["submit", "--resume", "--run_dir", str(run.root)]) == EXIT_CONFIG
    assert "has jobs in the queue (11)" in capsys.readouterr().err and not slurm.calls("sbatch")


# -- logs and list -----------------------------------------------------------------------------------------------------


def test_logs(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    for text in ("old", "new"):
        incarnation = begin(run, "rollout")
        for name in ("rollout", "rollout-rank-0", "rollout-rank-1", "rollout-srun"):
            (run.logs("rollout", incarnation) / f"{name}.log").write_text(f"{name} {text} 1\n{name} {text} 2\n")
    (run.root / "supervisor.log").write_text("started\n")
    of_run = ["logs", str(run.root)]
    assert main([*of_run, "-n", "1"]) == 0
    text = capsys.readouterr().out
    assert "rollout/inc-000002/rollout-rank-1: rollout-rank-1 new 2\n" in text and "supervisor: started" in text
    assert "old" not in text and "new 1" not in text
    assert main([*of_run, "--role", "rollout", "--rank", "1", "--incarnation", "1"]) == 0
    assert capsys.readouterr().out == "rollout-rank-1 old 1\nrollout-rank-1 old 2\n"
    assert main([*of_run, "--group", "actor"]) == EXIT_CONFIG and "no log of what" in capsys.readouterr().err


def test_logs_follow_new_lines_and_new_incarnations(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    first = run.logs("actor", begin(run, "actor")) / "actor.log"
    first.write_text("one\nhal")
    code: list[int] = []
    with helper(lambda: code.append(main(["logs", str(run.root), "--group", "actor", "--follow"]))):
        seen = ""

        def said(text: str) -> bool:
            nonlocal seen
            seen += capsys.readouterr().out
            return text in seen

        until(lambda: said("one\n"))
        with first.open("a") as file:
            file.write("f\ntwo\n")
        until(lambda: said("two\n"))
        (run.logs("actor", begin(run, "actor")) / "actor.log").write_text("three\n")
        until(lambda: said("actor/inc-000002/actor: three\n"))
        write_json(run.finished, {})
    assert code == [0]


def test_logs_show_each_line_once_though_files_are_cut(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "local")
    log = run.logs("actor", begin(run, "actor")) / "actor-rank-0.log"

    def write(*names: str, cut: bool = True) -> None:
        with log.open("ab") as file:
            file.writelines(f"{name}\n".encode() for name in names)
        assert cut_log(log, 1) if cut else True

    write("a", "b")
    write("c", "d")
    write("e", "f", cut=False)
    tail = logs.Tail(log, "")
    assert tail.last(5) == ["b", "c", "d", "e", "f"] and tail.new() == []
    write("g")
    write("h")
    write("i", cut=False)
    assert tail.new() == ["g", "h", "i"] and tail.new() == []
    write("j")
    assert tail.new() == ["j"], "the file is empty now"
    of_run = ["logs", str(run.root), "--group", "actor"]
    assert main([*of_run, "-n", "3"]) == 0 and capsys.readouterr().out.split() == ["h", "i", "j"]


def test_list(tmp_path: Path, slurm: FakeSlurm, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {name: make_run(tmp_path / "runs" / "deep" / name) for name in ("a", "b", "c", "d", "e")}
    submitted(runs["a"], slurm)
    requests.ask_to_stop(runs["b"], 93, "in circles")
    write_json(runs["c"].finished, {})
    Ledger(runs["d"]).add(Entry("77", "group", "hub"))
    slurm.set(jobs=slurm.state["jobs"] | {"77": {"state": "PENDING"}})
    runs["e"].config.write_text("nonsense: 1\n")
    assert main(["list", str(tmp_path / "runs"), "--json"]) == EXIT_NO_PROGRESS
    found = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    kinds = {"a": "running", "b": "failed", "c": "finished", "d": "queued", "e": "unreadable"}
    assert {name: row["state"] for name, row in found.items()} == {f"deep/{k}": v for k, v in kinds.items()}
    assert found["deep/a"]["jobs"] == ["11", "12", "13", "14"] and len(slurm.calls("squeue")) == 1
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == EXIT_NO_PROGRESS and capsys.readouterr().out.count("\n") == 6
    assert main(["list", "nowhere"]) == EXIT_CONFIG
    assert [path.name for path in listing.run_directories(runs["a"].root)] == ["a"]


@pytest.mark.parametrize(
    ("stop", "state", "code"),
    [
        ((0, "asked to stop"), "stopped", 130),
        ((78, "lr"), "failed", 78),
        ((75, "disk"), "failed", 75),
        ((), "ended", 75),
    ],
)
@pytest.mark.parametrize("how", ["marks", "gone"])
def test_the_end_of_a_run_is_known_at_once(
    tmp_path: Path, slurm: FakeSlurm, capsys: Any, stop: tuple, state: str, code: int, how: str
) -> None:
    """By what its roles have said, or because their processes are not there any more: their beats are young."""
    run = make_run(tmp_path / "runs" / "a", "local")
    assert main(["status", str(run.root)]) == EXIT_RETRY
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        sign = identity() | {"pid": process.pid, "born": signs._born(process.pid)}
        for name in GROUPS:
            incarnation = begin(run, name)
            beat = run.rendezvous(name) / f"beat-{name}.json"
            write_json(beat, json.loads(beat.read_text()) | sign)
        assert status(run, 0.05)["state"] == "running" == listing.runs(tmp_path)[0]["state"]
        assert main(["status", str(run.root)]) == main(["list", str(tmp_path)]) == 0
        for name in GROUPS if how == "marks" else ():
            for role in roles_of(load_resolved(run.root), name):
                leave_mark(run.exit_mark(name, incarnation, role), 75, "ended by its supervisor")
        process.kill() if how == "gone" else None
    if stop:
        requests.ask_to_stop(run, *stop)
    found = status(run, 0.05)
    assert (found["state"], found["exit_code"]) == (state, code)
    assert {group["state"] for group in found["groups"].values()} == {"ended"}
    capsys.readouterr()
    assert main(["status", str(run.root)]) == main(["list", str(tmp_path), "--json"]) == code
    assert f'"state": "{state}", "exit_code": {code}' in capsys.readouterr().out


def test_a_run_whose_jobs_squeue_does_not_know_has_ended(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path / "runs" / "a")
    submitted(run, slurm)
    assert listing.runs(tmp_path)[0]["state"] == status(run, 0.05, Slurm(30.0, 1))["state"] == "running"
    slurm.set(jobs={})
    assert listing.runs(tmp_path)[0]["state"] == status(run, 0.05, Slurm(30.0, 1))["state"] == "ended"
    slurm.answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert listing.runs(tmp_path)[0]["state"] == "running", "its beats say so, and nobody else says anything"


def test_what_groups_load_is_shown(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path / "run", "local")
    say(run.preparing, "warm start of 80 steps")
    found = status(run, 0.05)
    assert found["state"] == "starting" and "preparing: warm start of 80 steps (0 s)" in "\n".join(lines(found))
    assert listing.runs(tmp_path)[0]["state"] == "starting"
    say(run.preparing, "")
    begin(run, "rollout")
    beat = run.rendezvous("rollout") / "beat-rollout.json"
    write_json(beat, json.loads(beat.read_text()) | {"doing": "SGLang is loading weights", "doing_s": 75.0})
    found = status(run, 0.05)
    assert found["state"] == "running" and found["groups"]["rollout"]["doing"] == "SGLang is loading weights (75 s)"
    assert re.search(r"^rollout +running .*SGLang is loading weights \(75 s\)$", "\n".join(lines(found)), re.M)


def until(condition: Any) -> None:
    """Look until it is true; AssertionError at the deadline."""
    for _ in range(int(DEADLINE_S / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("not within the deadline")


class helper:
    """A thread beside the test, which ends with the block."""

    def __init__(self, target: Any) -> None:
        self.thread = threading.Thread(target=target)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
