"""Experiment trackers receive every line of metrics.jsonl, and one that fails does not disturb the
run."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.metrics.first_failures import read_failures
from relax_hpc.base.metrics.read import load_metrics, read_metrics
from relax_hpc.base.metrics.writer import MetricsWriter
from relax_hpc.base.rundir import RunDir
from relax_hpc.config import dump, load
from relax_hpc.net.tracker_processes import REASON, TrackerProcesses
from relax_hpc.ops.checks.settings import check
from tests.helpers.run_helpers import LIGHT, merged, running

RUN_S = 240.0
FINISH_S = 60.0
FAILING = ("Raises", "Blocks", "IsKilled", "CannotBeMade")


def recorded(run_dir: Path) -> list[list[Any]]:
    """Calls of a `Recorder`, in their order."""
    return [json.loads(line) for line in (run_dir / "recorded.jsonl").read_text().splitlines()]


def names(*classes: str) -> list[str]:
    return [f"tests.runs.trackers:{name}" for name in classes]


@pytest.mark.run
def test_a_run_reports_every_step_and_each_failing_tracker_once(tmp_path: Path) -> None:
    trackers = [*names("Recorder", *FAILING), "relax_hpc.examples.tracker:CsvTracker"]
    over = {
        "metrics": {"trackers": trackers, "tracker_timeout_s": 1.0},
        "eval": {"every": 2, "samples": 4},
        # Trackers have half of it to finish, so that a slow machine does not end them before.
        "liveness": {"stop_timeout_s": 2 * FINISH_S},
    }
    with running(tmp_path, merged(LIGHT, over)) as live:
        live.finish(RUN_S)
        run = live.run.root
    lines = load_metrics(run).lines
    values = [{tag: value for tag, value in line.items() if "/" in tag} for line in lines]
    made, *logged, finished = recorded(run)
    assert (made, finished) == (["made", 3], ["finish"])
    expected = [
        ["log", line["step"], v, line["time"]] for line, v in zip(lines, values, strict=True)
    ]
    assert same(logged, expected) and {line["step"] for line in lines} >= {0, 1, 2}
    rows = list(csv.reader((run / "rewards.csv").open()))
    steps = [row for row in read_metrics(run) if "reward/mean" in row]
    assert [(int(step), float(reward)) for step, reward, _ in rows] == [
        (s["step"], s["reward/mean"]) for s in steps
    ]
    assert (run / "blocks-0").exists() and not (run / "blocks-1").exists(), (
        "it is still in its first call"
    )
    failures = [failure for failure in read_failures(run) if failure.reason == REASON]
    assert sorted(failure.detail.partition(": ")[0] for failure in failures) == sorted(
        names(*FAILING)
    )
    details = {failure.detail.partition(": ")[0].partition(":")[2]: failure for failure in failures}
    assert "ConnectionError: the service does not answer" in details["Raises"].detail
    assert (
        "trackers.py" in details["Raises"].location
        and "raise ConnectionError" in details["Raises"].traceback
    )
    assert "took longer than metrics.tracker_timeout_s, 1 s" in details["Blocks"].detail
    assert "trackers.py" in details["Blocks"].location, "where it stands"
    assert "ended by signal 9" in details["IsKilled"].detail
    assert "no key" in details["CannotBeMade"].detail
    shown = live.output.read_text()
    assert all(shown.count(f"{REASON}: {name}: ") == 1 for name in names(*FAILING)), shown


def same(calls: list[Any], expected: list[Any]) -> bool:
    """Whether both are equal, nan to nan too."""
    return repr(calls) == repr(expected)


@pytest.fixture
def run(run_dir: Path) -> RunDir:
    run = RunDir(run_dir)
    dump(
        load([], {"seed": 7, "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits"}),
        run.config,
    )
    run.logs("hub", 1).mkdir(parents=True)
    return run


def start(run: RunDir, *classes: str) -> tuple[TrackerProcesses, list[tuple[str, ...]]]:
    """Processes of trackers, and a list to which their failures are added."""
    failures: list[tuple[str, ...]] = []
    logs = run.logs("hub", 1)
    return TrackerProcesses(
        run, names(*classes), logs, lambda *failure: failures.append(failure)
    ), failures


def test_a_tracker_continues_where_the_process_before_has_ended(run: RunDir) -> None:
    with MetricsWriter(run.root, incarnation=1) as metrics:
        metrics.write(0, {"reward/mean": 0.5, "loss/policy": math.nan}, time=5.0)
        metrics.write(1, {"reward/mean": 1}, time=6.0)
        first, failures = start(run, "Recorder")
        first.close(FINISH_S)
        metrics.rolled_back(1)
        metrics.write(1, {"reward/mean": 2}, time=7.0)
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "half')
    second, more = start(run, "Recorder")
    second.close(FINISH_S)
    assert failures == more == []
    assert same(
        recorded(run.root),
        [
            *(["made", 7], ["log", 0, {"reward/mean": 0.5, "loss/policy": math.nan}, 5.0]),
            *(["log", 1, {"reward/mean": 1.0}, 6.0], ["finish"]),
            *(["made", 7], ["rolled_back", 1], ["log", 1, {"reward/mean": 2.0}, 7.0], ["finish"]),
        ],
    )
    assert (
        "a tracker may print"
        in (run.logs("hub", 1) / "tracker-tests.runs.trackers.Recorder.log").read_text()
    )


def test_many_lines_and_torn_ones_are_read_in_blocks(run: RunDir) -> None:
    with run.metrics.open("w") as file:
        for step in range(3000):
            line = {
                "step": step,
                "time": 1.0,
                "incarnation": 1,
                **{f"perf/{n}": 0.5 for n in range(20)},
            }
            file.write(json.dumps(line) + "\n" + '{"torn": 1}\n')
        file.writelines('{"torn": 1}\n' for _ in range(50_000))
        file.write(json.dumps({"step": 3000, "time": 1.0, "incarnation": 1}) + "\n")
    trackers, failures = start(run, "Recorder")
    trackers.close(FINISH_S)
    assert not failures and [call[1] for call in recorded(run.root)[1:-1]] == list(range(3001))


def test_a_tracker_that_never_finishes_is_ended_and_reported(run: RunDir) -> None:
    with MetricsWriter(run.root, incarnation=1) as metrics:
        metrics.write(0, {"reward/mean": 0.5})
    trackers, failures = start(run, "BlocksAtItsEnd", "BlocksAtItsEnd")
    trackers.close(0.2)
    trackers.report_failures()
    assert [failure[:2] for failure in failures] == [("hub", REASON)] * 2
    assert all(
        "had not finished 0.2 s after the end of the run" in failure[2] for failure in failures
    )


@pytest.mark.parametrize(
    ("trackers", "says"),
    [
        (
            ["Recorder"],
            "metrics.trackers: found 'Recorder', allowed: wandb, trackio, mlflow or package",
        ),
        (["no_such:Tracker"], "metrics.trackers: 'no_such:Tracker': importing 'no_such' failed"),
        (
            ["pathlib:Path"],
            "metrics.trackers: 'pathlib:Path': found no class derived from "
            "relax_hpc.base.metrics.trackers",
        ),
        (
            names("LogsNothing"),
            "metrics.trackers: 'tests.runs.trackers:LogsNothing': found no method log; define log(self,",
        ),
        (names("NeedsMore"), "metrics.trackers: 'tests.runs.trackers:NeedsMore' takes (run_dir"),
        (
            names("OtherParameters"),
            "metrics.trackers: 'tests.runs.trackers:OtherParameters': method log takes (self",
        ),
        (
            names("Recorder", "Recorder"),
            "metrics.trackers: found 'tests.runs.trackers:Recorder' twice, allowed: once",
        ),
    ],
)
def test_check_names_the_mistake_in_a_tracker(trackers: list[str], says: str) -> None:
    (finding,) = [
        text
        for text in check(load([], {"metrics.trackers": trackers}))
        if text.startswith("metrics.")
    ]
    assert finding.startswith(says)


def test_check_takes_good_trackers() -> None:
    good = {"metrics.trackers": [*names("Recorder"), "relax_hpc.examples.tracker:CsvTracker"]}
    assert not [text for text in check(load([], good)) if text.startswith("metrics.")]
