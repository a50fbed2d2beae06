"""`relax-hpc report` on runs whose spans are known to the second, so that every figure has a known
answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG
from relax_hpc.base.metrics.length_counts import count_lengths
from relax_hpc.base.metrics.writer import MetricsWriter
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.supervise.launch_records import Launch, record_launch
from relax_hpc.commands.program import main
from relax_hpc.config import dump, load
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.ops.observe.report import report
from relax_hpc.ops.observe.report_view import lines

ORIGIN = 1000.0
"""Wall time at which the run began; spans count from there."""
GPU = {"groups.rollout.resources.gpus_per_node": 4, "groups.actor.resources.gpus_per_node": 4}
ROWS = ("rollout", "rows of rollout")
Spanned = list[tuple]
"""(kind, start, end), and of work a step, of a wait peer and reason."""


def make_run(path: Path, **over: Any) -> RunDir:
    run = RunDir(path)
    run.create()
    shape = {
        "steps": 5,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_staleness": 1,
        "layout": "jobs",
    }
    dump(
        load(
            [],
            shape
            | {"run_dir": str(path), "groups.reference": None, "groups.actor_fwd": None}
            | over,
        ),
        run.config,
    )
    return run


def incarnation(
    run: RunDir,
    group: str,
    began: float,
    spans: Spanned,
    ended: float | None,
    lane: str = "",
    attempt: int = 1,
    stages: Sequence[tuple[str, float, float]] = (),
    detected: float = 0.0,
) -> int:
    """Spans of the next incarnation of a group with a role of its name; without ``ended`` it left
    no word. ``detected``: when the end of the incarnation before it was detected."""
    incarnation = claim_incarnation(run, group)
    launch = Launch(attempt, (0, 0, 0), "11", f"11/{attempt}")
    if detected:
        launch = replace(launch, detected_at=ORIGIN + detected, launched_at=ORIGIN + detected)
    record_launch(run, group, incarnation, launch)
    folder = run.logs(group, incarnation)
    folder.mkdir(parents=True)
    role = "advantages" if group == "hub" else group
    text = [{"role": role, "monotonic": began, "wall": ORIGIN + began, "boot": "b", "began": began}]
    for stage, start, end in stages:
        text.append({"role": role, "stage": stage, "lane": "", "start": start, "end": end})
    for what, start, end, *about in spans:
        step = about[0] if about and what != "wait" else None
        line = {"role": role, "what": what, "step": step, "start": start, "end": end, "lane": lane}
        text.append(
            line | (dict(zip(("peer", "reason"), about, strict=True)) if what == "wait" else {})
        )
    text += [{"ended": ended}] if ended is not None else []
    (folder / f"spans-{role}-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))
    return incarnation


def generated() -> Spanned:
    """Ten seconds to start, then 6 of each 10 generating until 70."""
    spans: Spanned = [("start", 0, 10)]
    for step in range(6):
        at = 10 + 10 * step
        spans += [
            ("generate", at, at + 6, step),
            ("wait", at + 6, at + 10, "actor", "tickets: a newer version"),
        ]
    return spans


def trained_until_killed() -> Spanned:
    """Steps 0 to 2; what it was at when it died at 48 is not written."""
    spans: Spanned = [("start", 0, 12)]
    for step, since in enumerate((12, 19, 29)):
        at = 16 + 10 * step
        spans += [
            ("wait", since, at, *ROWS),
            ("train", at, at + 2, step),
            ("publish", at + 2, at + 3, step + 1),
        ]
    return [*spans, ("wait", 39, 46, *ROWS)]


def trained_again() -> Spanned:
    """From step 2 on, which was not saved."""
    return [
        ("start", 50, 53),
        ("publish", 53, 54, 2),
        ("wait", 54, 55, "hub", "an answer of the queue"),
        ("train", 55, 57, 2),
        ("publish", 57, 58, 3),
        ("wait", 58, 60, *ROWS),
        ("train", 60, 62, 3),
        ("publish", 62, 63, 4),
        ("wait", 63, 66, *ROWS),
        ("train", 66, 68, 4),
        ("publish", 68, 69, 5),
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """5 steps; the actor is killed after step 2, which is trained again."""
    run = make_run(tmp_path / "run", **GPU)
    incarnation(run, "hub", 0, [("wait", 1, 70, *ROWS)], 70)
    incarnation(run, "rollout", 0, generated(), 70, lane="0")
    number = incarnation(run, "actor", 0, trained_until_killed(), None)
    with (run.logs("actor", number) / "spans-actor-0.jsonl").open("a") as file:
        file.write('7\n[]\n\0\0\n{"role": "act')
    mark = run.exit_mark("actor", number, "actor")
    write_exit_mark(mark, 75, "rank 0 was ended by signal 9")
    os.utime(mark, (ORIGIN + 48, ORIGIN + 48))
    stages = (
        ("starting the process", 50, 50.5),
        ("importing libraries", 50.5, 51.5),
        ("loading checkpoint i000001-step-000001", 51.5, 53),
    )
    incarnation(run, "actor", 50, trained_again(), 70, stages=stages, detected=48.5)
    step = {
        "reward/mean": 0.5,
        "reward/response_tokens": 25,
        "perf/rollout_tokens": 100,
        "perf/trained_tokens": 120,
    }
    step |= count_lengths("trained", [1, 8], 8) | count_lengths("generated", [1, 8, 8, 9], 8)
    with MetricsWriter(run.root, 1) as metrics:
        for number in range(3):
            metrics.write(number, step)
        metrics.rolled_back(2)
        for number in range(2, 5):
            metrics.write(number, step | {"queue/dropped_rolled_back": 4})
    return run


def test_seconds_of_every_role_add_up(run: RunDir) -> None:
    roles = report(run)["roles"]
    assert list(roles) == ["rollout", "actor", "advantages"]
    assert roles["rollout"]["seconds"] == {"generate": 36, "wait": 24, "start": 10}
    actor = {"wait": 31, "start": 15, "train": 12, "publish": 7, "unfinished": 2, "other": 1}
    assert roles["actor"]["seconds"] == actor and roles["actor"]["worker_s"] == 48 + 20
    for about in roles.values():
        assert sum(about["seconds"].values()) == pytest.approx(about["worker_s"])
        assert sum(about["share"].values()) == pytest.approx(1.0)


def test_waits_by_peer_and_reason(run: RunDir) -> None:
    found = [(w["role"], w["peer"], w["reason"], w["seconds"]) for w in report(run)["waits"]]
    assert found == [
        ("rollout", "actor", "tickets: a newer version", 24),
        ("actor", *ROWS, 30),
        ("actor", "hub", "an answer of the queue", 1),
        ("advantages", *ROWS, 69),
    ]


def test_pace_and_split(run: RunDir) -> None:
    """Steps of 10, 29, 5 and 6 s; rollout is busy 6, 18, 2 and 4 s in them, the actor 3 s in all
    but the second."""
    found = report(run)
    assert found["pace"] == {
        "steps": 4,
        "step_s": 8,
        "rollout_s": 5,
        "actor_s": 3,
        "overlap": 5 / 8,
    }
    assert found["split"] == {
        "unit": "GPU",
        "present": {"rollout": 4, "actor": 4},
        "suggested": {"rollout": 5, "actor": 3},
        "suggested_busy_s": {"rollout": 4.0, "actor": 4.0},
    }


def test_goodput(run: RunDir) -> None:
    assert report(run)["goodput"] == {
        "trained_tokens": 600,
        "trained_tokens_per_s": pytest.approx(600 / 70),
        "generated_tokens": 600,
        "trained_share": pytest.approx(500 / 600),
        "trained_samples": 20,
        "dropped_samples": {"rolled_back": 4},
    }


def test_hours_and_restarts(run: RunDir) -> None:
    """Between 38 and 55 the actor's GPUs were lost; 2 s of training were for nothing."""
    found = report(run)
    assert found["restarts"] == [
        {
            "group": "actor",
            "incarnation": 2,
            "at_s": 48,
            "gap_s": 17,
            "fault": True,
            "why": "rank 0 was ended by signal 9",
            "recovery": {
                "total": 9,
                "detection": 0.5,
                "process": 2.0,
                "imports": 1.0,
                "weights": 1.5,
                "compilation": 0,
                "waits": 1,
                "other": 1,
                "step": 2,
            },
        }
    ]
    text = list(lines(found))
    assert text[-2].split()[:4] == ["RECOVERY", "INCARNATION", "TOTAL", "DETECTION"]
    assert text[-1].split() == [
        "actor",
        "2",
        "9.0",
        "0.5",
        "2.0",
        "1.0",
        "1.5",
        "0.0",
        "1.0",
        "1.0",
        "2.0",
    ]
    expected = {
        "asked": 560,
        "used": 204,
        "waiting": 188,
        "lost_restarting": 68,
        "lost_again": 8,
        "rest": 92,
    }
    assert found["hours"] == {"unit": "GPU"} | {
        name: pytest.approx(s / 3600) for name, s in expected.items()
    }


def test_some_steps_alone(run: RunDir) -> None:
    found = report(run, first=3, last=4)
    assert (found["first_step"], found["last_step"], found["wall_s"]) == (3, 4, 68 - 57)
    assert found["roles"]["actor"]["seconds"] == {"wait": 5, "train": 4, "publish": 2}
    assert found["pace"] == {
        "steps": 2,
        "step_s": 5.5,
        "rollout_s": 3,
        "actor_s": 3,
        "overlap": 3 / 5.5,
    }
    assert found["goodput"]["trained_tokens"] == 240 and found["goodput"]["dropped_samples"] == {}
    assert (
        found["hours"]["lost_restarting"] == found["hours"]["lost_again"] == 0
        and not found["restarts"]
    )
    assert found["notes"] == ["pace and split are medians of 2 steps; reliable from 5 steps on"]


def test_it_reads_well(run: RunDir, capsys: Any) -> None:
    assert main(["report", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report(run)))
    assert main(["report", str(run.root), "--first-step", "1"]) == 0
    assert "steps 1 to 4" in capsys.readouterr().out
    text = [line.replace(str(run.root), "RUN") for line in lines(report(run))]
    assert max(map(len, text)) <= 100 and not any(line != line.rstrip() for line in text)
    assert " ".join(text[:2]) == (
        "Generation limits this run: the actor waits 59% of its time for rows; 5 instead of 4 of "
        "the 8 GPUs for rollout would make both sides equally busy."
    )
    for said in (
        "steps 0 to 4 in 1m10s",
        "lost to faults, restarting 0.0189 12.1%",
        "generated 24 6.5 0.4 6.0 8.0 8.0",
        "trained 10 4.5 0.2 1.0 7.2 7.9",
        "trained episodes are 31% shorter than generated ones: long ones are dropped or still wait",
        "actor rollout rows of rollout 30.0 44.1%",
        "step: 8.00 s (median of 4), rollout busy 5.00 s of it, actor 3.00 s",
        "split: 4 GPUs for rollout and 4 for training",
        "5 and 3 would be even: busy 4.00 and 4.00 s of a step",
        "tokens generated: 600, 83.3% of them trained; samples dropped: rolled_back 4",
        "GPU-hours: held 0.156",
        "rank 0 was ended by signal 9",
    ):
        assert any(said in " ".join(line.split()) for line in text), said


def test_what_is_not_there_is_said_in_a_line(tmp_path: Path, run: RunDir, capsys: Any) -> None:
    assert main(["report", str(tmp_path)]) == EXIT_CONFIG
    assert main(["report", str(run.root), "--first-step", "7"]) == EXIT_CONFIG
    assert main(["report", str(run.root), "--first-step", "3", "--last-step", "2"]) == EXIT_CONFIG
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("error: ")[2] for line in said] == [
        f"{tmp_path}: no run here (config.yaml is missing); name a run directory",
        "--first-step: found 7, allowed: a step from 0 to 4",
        "--last-step: found 2, allowed: at least --first-step 3",
    ]


def test_an_empty_run_and_one_without_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    found = report(run)
    assert (found["roles"], found["pace"], found["split"], found["goodput"]) == (
        {},
        None,
        None,
        None,
    )
    assert list(lines(found))[:3] == [
        "What limits this run is not known yet, because no step was trained.",
        f"{run.root}: not finished, no step in 0.0s",
        "note: no role has written a span yet; run the report again after the first step",
    ]
    incarnation(run, "actor", 0, [], 30)
    found = report(run)
    assert found["roles"]["actor"]["seconds"] == {"start": 30} and found["hours"]["unit"] == "node"
    assert found["notes"] == ["pace and split are medians of 0 steps; reliable from 5 steps on"]


def test_files_and_lines_that_are_no_spans_of_ours_change_nothing(run: RunDir) -> None:
    before, folder = report(run), run.logs("actor", 1)
    clock = {"role": "actor", "monotonic": 0, "wall": ORIGIN, "boot": "b", "began": 0}
    span = {"role": "actor", "what": "train", "step": 9, "start": 1, "end": 2}
    odd = [
        clock | {"boot": None},
        clock | {"wall": "now"},
        {"wall": 1},
        span | {"start": "x"},
        span | {"role": ["a"]},
    ]
    odd += [
        span | {"what": None},
        span | {"step": "9"},
        span | {"peer": 7},
        {"ended": "x"},
        {},
        [],
        "x",
        None,
    ]
    lines = [json.dumps(line) for line in odd] + [
        "[" * 100_000,
        json.dumps(span | {"end": 1}).replace("1", "1e999"),
    ]
    lines += [
        json.dumps(span).replace('"start": 1', f'"start": {wrong}')
        for wrong in ("NaN", "1" + "0" * 400, "-1e200")
    ]
    with (folder / "spans-actor-0.jsonl").open("a") as file:
        file.write("\n".join(["", *lines, ""]))
    whole = "\n".join(json.dumps(line) for line in (clock, span, {"ended": 3}))
    for number, name in enumerate(
        ("spans-actor-0 (copy).jsonl", "spans-.jsonl", "spans-rollout-0.jsonl", "spans-a-b.jsonl")
    ):
        (folder / name).write_text("\n".join(lines) if number == 1 else whole)
    (folder / "spans-actor-1.jsonl").mkdir()
    os.mkfifo(folder / "spans-actor-2.jsonl")
    (run.root / "logs/actor/inc-backup").mkdir()
    (run.root / "logs/actor/inc-backup/spans-actor-0.jsonl").write_text(whole)
    assert report(run) == before


def test_a_live_run_lasts_until_now(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", layout="local")
    incarnation(run, "rollout", 0, [("start", 0, 4), ("generate", 4, 10, 0)], None)
    assert report(run, now=ORIGIN + 15)["roles"]["rollout"]["worker_s"] == 10, (
        "nobody beats: it ended unseen"
    )
    write_json(
        run.rendezvous("rollout") / "beat-rollout.json", {"time": time.time(), "incarnation": 1}
    )
    found = report(run, now=ORIGIN + 15)
    assert found["roles"]["rollout"]["seconds"] == {"generate": 6, "unfinished": 5, "start": 4}
    assert found["hours"]["unit"] == "process" and found["hours"]["asked"] == pytest.approx(
        15 / 3600
    )


def test_what_the_user_wanted_is_no_fault(tmp_path: Path) -> None:
    """A run that was stopped and resumed a day later, on other nodes."""
    run, day = make_run(tmp_path / "run"), 86400.0
    for attempt, at in enumerate((0.0, day), start=1):
        spans = [("start", at, at + 2), ("train", at + 2, at + 10, attempt)]
        number = incarnation(run, "actor", at, spans, at + 10, attempt=attempt)
        write_exit_mark(run.exit_mark("actor", number, "actor"), 75, "saved step 2", stopped=True)
    found = report(run)
    assert [(one["fault"], one["gap_s"], one["why"]) for one in found["restarts"]] == [
        (False, day - 8, "saved step 2")
    ]
    assert found["wall_s"] == 20 and found["hours"]["asked"] == pytest.approx(20 / 3600)
    assert found["hours"]["lost_restarting"] == 0 and found["hours"]["rest"] == pytest.approx(
        4 / 3600
    )
