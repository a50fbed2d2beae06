"""Events of a run for people, and the command of the site that receives them."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from relax_hpc.base.metrics.writer import MetricsWriter
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.events import command as command_module
from relax_hpc.cluster.events import watch as watch_module
from relax_hpc.cluster.events.command import EventCommand
from relax_hpc.cluster.events.conditions import Key, Observations, find_conditions
from relax_hpc.cluster.events.log import EventLog, read_notifications
from relax_hpc.cluster.events.watch import EventWatch
from relax_hpc.cluster.slurm.end_mail import EndMail
from relax_hpc.cluster.slurm.submissions import Submission
from relax_hpc.commands.on_end import report_end
from relax_hpc.config import Config, dump, load
from relax_hpc.config.schema import EventsConfig
from tests.helpers.small_disk import small_disk

NOW = 10_000.0
COPY = "import pathlib, sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


def steps(rates: Sequence[float], pace_s: float = 10.0, **last: float) -> list[dict[str, Any]]:
    """Lines of steps that each train ``rates`` tokens per second. ``last``: tags of the last."""
    lines: list[dict[str, Any]] = []
    for number, rate in enumerate(rates):
        at = NOW + pace_s * (number - len(rates))
        line = {"step": number, "time": at, "incarnation": 1, "loss/policy": 0.5}
        lines.append({**line, "perf/trained_tokens": rate * pace_s})
    lines[-1].update({tag.replace("__", "/"): value for tag, value in last.items()})
    return lines


def seen(**values: Any) -> Observations:
    return Observations(now=NOW, progress_since=values.pop("progress_since", NOW), **values)


DISK = {"path": "/r/queue/x", "errno": 28, "seconds": 5.0, "loose": False}
UNSAVED = {
    **{"step": 5, "failed": 2, "why": "unwritten", "steps": 3, "unit": "GPU", "spent": 1.0},
    "seconds": 4000.0,
}
AWAITED = {"rollout": {"why": "is pending", "since_s": 700.0}}
GOOD = [100.0] * 30


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        (seen(steps=steps(GOOD)), {}),
        (seen(awaited_groups=AWAITED), {("waiting", "rollout"): "is pending; others have waited"}),
        (seen(awaited_groups={"rollout": {"why": "is loading", "since_s": 500.0}}), {}),
        (seen(hub_silent_s=700.0), {("waiting", "hub"): "has not answered for 700 s"}),
        (seen(unsaved=UNSAVED), {("unsaved_work", ""): "NOT SAVED since step 5 (2 failed"}),
        (seen(unsaved={**UNSAVED, "seconds": 60.0}), {}),
        (seen(disks=[DISK]), {("disk", "/r/queue/x"): "No space left on device"}),
        (seen(progress_since=NOW - 1700.0), {}),
        (seen(progress_since=NOW - 1900.0), {("no_progress", ""): "no step has ended, for 1900 s"}),
        (seen(progress_since=NOW - 1900.0, awaited_groups={"a": {"why": "", "since_s": 1.0}}), {}),
        (
            seen(steps=steps(GOOD, 10.0), progress_since=NOW - 700.0),
            {("no_progress", ""): "since step 29, for 700 s; expected at most 600 s"},
        ),
        (seen(steps=steps(GOOD, 100.0), progress_since=NOW - 700.0), {}),
        (
            seen(steps=steps(GOOD, loss__policy=math.nan)),
            {("non_finite_loss", ""): "step 29: loss/policy is not finite"},
        ),
        (
            seen(steps=steps(GOOD, loss__skipped_updates=2.0)),
            {("non_finite_loss", ""): "step 29: 2 updates skipped"},
        ),
        (
            seen(steps=steps([*GOOD, *[20.0] * 5])),
            {("falling_goodput", ""): "20 trained tokens per second in the last 5 steps, 20% of"},
        ),
        (seen(steps=steps([*GOOD, *[60.0] * 5])), {}),
        (seen(steps=steps([*[100.0] * 10, *[20.0] * 5])), {}),
        (
            seen(readers={"rollout/0": "i000000-v000000", "rollout/1": "i000001-v000003"}),
            {("engine_lost", "rollout/0"): "serves no version"},
        ),
        (seen(readers={"rollout/0": "i000000-v000000"}, removed_engines=["rollout/0"]), {}),
        (
            seen(lost_engines={"rollout/1000": "connection refused"}),
            {("engine_lost", "rollout/1000"): "connection refused"},
        ),
    ],
)
def test_a_condition_has_a_subject_and_one_line(
    observations: Observations, expected: Mapping[Key, str]
) -> None:
    found = find_conditions(observations, Config())
    assert found.keys() == expected.keys()
    for key, text in expected.items():
        assert text in found[key] and "\n" not in found[key]


def test_goodput_recovers_at_a_higher_bound_than_it_falls() -> None:
    observations = seen(steps=steps([*GOOD, *[60.0] * 5]))
    assert not find_conditions(observations, Config())
    assert find_conditions(observations, Config(), [("falling_goodput", "")])
    observations = seen(steps=steps([*GOOD, *[75.0] * 5]))
    assert not find_conditions(observations, Config(), [("falling_goodput", "")])


@pytest.fixture
def run(run_dir: Path) -> RunDir:
    run = RunDir(run_dir)
    task = "relax_hpc.examples.tasks.sort_digits:SortDigits"
    dump(load([], {"data.task": task}), run.config)
    return run


def test_events_are_raised_late_and_resolved_late(run: RunDir) -> None:
    log = EventLog(run, EventsConfig(hold_s=30.0, clear_s=120.0))
    disk: Key = ("disk", "/r")

    def states(found: Mapping[Key, str], now: float) -> list[tuple[str, str, float]]:
        return [(event.event, event.state, event.since) for event in log.update(found, now, 7)]

    assert not states({disk: "full"}, 0.0) and not states({}, 10.0), "it was short"
    assert not states({disk: "full"}, 20.0) and not states({disk: "full"}, 40.0)
    assert states({disk: "full"}, 50.0) == [("disk", "raised", 20.0)]
    for now in range(60, 600, 60):
        # The condition flaps: no event.
        assert not states({disk: "full"} if now % 120 else {}, float(now))
    assert not states({}, 660.0)
    assert states({}, 780.0) == [("disk", "resolved", 20.0)]
    assert states({("non_finite_loss", ""): "nan"}, 790.0) == [("non_finite_loss", "raised", 790.0)]
    log.close()
    # The next supervisor knows what was raised.
    successor = EventLog(run, EventsConfig(clear_s=0.0))
    assert list(successor.active) == [("non_finite_loss", "")]
    (event,) = successor.update({}, 800.0, 8)
    assert (event.number, event.state, event.detail) == (4, "resolved", "nan")
    successor.close()


def make(
    run: RunDir, program: list[str], said: list[str], command_s: float = 30.0
) -> tuple[EventLog, EventCommand]:
    config = load([run.config], {})
    config.site.on_event, config.events.command_s = program, command_s
    log = EventLog(run, config.events)
    return log, EventCommand(run, config, log, said.append)


def test_the_command_gets_each_event_as_one_json_document(run: RunDir, tmp_path: Path) -> None:
    said: list[str] = []
    received = tmp_path / "a $(touch x); file"
    log, command = make(run, [sys.executable, "-c", COPY, str(received)], said)
    detail = "rollout: $(touch /tmp/x) `id`\n" + "x" * 5000
    log.report("run_failed", detail, time.time(), 3)
    log.resolve("run_failed", "the run continues", time.time(), 3)
    command.finish(60.0)
    first, second = map(json.loads, received.read_text().splitlines())
    assert first["detail"].startswith("rollout: $(touch /tmp/x) `id` x") and not said
    assert (first["format"], first["number"], first["state"]) == (1, 1, "raised")
    assert (second["number"], second["state"]) == (2, "resolved")
    assert first["run"]["run_dir"] == str(run.root) and first["steps"] == 100
    log.close()
    assert not EventLog(run, EventsConfig()).unsent, "the next supervisor does not send them again"


def test_a_command_that_hangs_is_killed_with_its_children_and_tried_again(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module, "PAUSE_S", 0.0)
    monkeypatch.setattr(command_module, "TRIES", 2)
    said: list[str] = []
    pids = tmp_path / "pids"
    hang = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], "
        "stdin=subprocess.PIPE); open(sys.argv[1], 'a').write(f'{p.pid}\\n'); p.wait()"
    )
    program = [sys.executable, "-c", hang, str(pids), "--token=secret"]
    log, command = make(run, program, said, command_s=60.0)
    log.report("run_ended", "finished", time.time(), 3)
    children: list[int] = []
    for tries in (1, 2):
        command.poll()
        while len(children) < tries:
            time.sleep(0.01)
            children = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
        # Its time is over.
        command._deadline = 0.0
        command.poll()
    assert said == [
        f"site.on_event: {sys.executable}: ended after events.command_s=60 s",
        f"site.on_event: event 1 (run_ended) was not delivered in 2 tries; it is in "
        f"{run.notifications}",
    ]
    assert not log.unsent
    assert not any(map(is_alive, children))
    log.close()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_missing_command_is_said_once_and_nothing_waits(run: RunDir) -> None:
    said: list[str] = []
    log, command = make(run, ["/no/such/command"], said)
    for number in range(5):
        log.report(f"e{number}", "", time.time(), 0)
        command.poll()
    assert said == ["site.on_event: /no/such/command: No such file or directory"]
    log.close()


def test_events_are_reported_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run = RunDir(disk.folder / "run")
        run.create()
        task = "relax_hpc.examples.tasks.sort_digits:SortDigits"
        dump(load([], {"data.task": task}), run.config)
        received, said = tmp_path / "received", list[str]()
        log, command = make(run, [sys.executable, "-c", COPY, str(received)], said)
        disk.fill()
        for now in (0.0, 100.0):
            log.update({("disk", str(run.root)): "full"}, now, 0)
        command.finish(60.0)
        assert json.loads(received.read_text())["event"] == "disk" and not said
        assert not read_notifications(run)
        disk.free()
        log.close()
        lines = [line.get("event", "sent") for line in read_notifications(run)]
        assert lines == ["disk", "sent"]


class FakeLiveness(SimpleNamespace):
    """What the supervisor knows from the hub."""

    def __init__(self) -> None:
        super().__init__(
            awaited_groups={},
            answered_at=time.monotonic(),
            beats={},
            progress=(3, 0, 0),
            readers={"rollout/0": "i000001-v000001"},
        )


class FakeClient:
    """Client of a hub that knows one lost engine."""

    def __init__(self) -> None:
        self.operations = self

    def present(self, timeout: float) -> Future[Any]:
        engine = SimpleNamespace(name="rollout/1000", state="lost", detail="refused", reason="")
        answer: Future[Any] = Future()
        answer.set_result(SimpleNamespace(external=[engine]))
        return answer


def test_the_watch_of_a_supervisor_sees_metrics_waits_and_engines(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_LOOK_S", 0.0)
    config = load([run.config], {"events.hold_s": 0.0, "events.clear_s": 0.0})
    liveness: Any = FakeLiveness()
    client: Any = FakeClient()
    with MetricsWriter(run.root, 1) as metrics:
        metrics.write(0, {"reward/mean": 0.5, "loss/policy": 0.1})
        watch = EventWatch(run, config, lambda text: None)
        watch.update(liveness, client, [])
        assert not read_notifications(run)
        metrics.write(1, {"reward/mean": 0.5, "loss/policy": math.nan})
        liveness.awaited_groups = {"actor": {"why": "is pending", "since_s": 601.0}}
        watch.update(liveness, client, [DISK])
        raised = {(line["event"], line["subject"]) for line in read_notifications(run)}
        assert raised == {
            *(("non_finite_loss", ""), ("waiting", "actor"), ("disk", "/r/queue/x")),
            ("engine_lost", "rollout/1000"),
        }
        metrics.rolled_back(1)
        liveness.awaited_groups = {}
        watch.update(liveness, client, [])
    resolved = [x["event"] for x in read_notifications(run) if x["state"] == "resolved"]
    assert sorted(resolved) == ["disk", "non_finite_loss", "waiting"]
    watch.close(with_command=True)


def test_the_end_of_a_run_is_an_event_and_a_resumed_run_continues(
    run: RunDir, tmp_path: Path
) -> None:
    config = load([run.config], {})
    received = tmp_path / "received"
    config.site.on_event = [sys.executable, "-c", COPY, str(received)]
    report_end(run, config, ("failed", "rollout: ended 6 times"))
    document = json.loads(received.read_text())
    assert (document["event"], document["detail"]) == (
        "run_failed",
        "failed: rollout: ended 6 times",
    )
    watch = EventWatch(run, config, lambda text: None)
    watch.close(with_command=True)
    write_json(run.finished, {"steps": 3})
    report_end(run, config)
    events = [json.loads(text) for text in received.read_text().splitlines()]
    assert [(event["event"], event["state"]) for event in events] == [
        *(("run_failed", "raised"), ("run_failed", "resolved"), ("run_ended", "raised")),
    ]


def test_damaged_lines_of_the_log_are_left_out(run: RunDir) -> None:
    run.notifications.write_bytes(b'{"torn\n[]\n{"sent": "x"}\n\xff\n{"number": 1}\n')
    log = EventLog(run, EventsConfig())
    log.report("run_ended", "", time.time(), 1)
    log.close()
    (line,) = read_notifications(run)
    assert line["event"] == "run_ended"


@pytest.mark.parametrize(
    ("types", "end", "after", "calls"),
    [
        ("END,FAIL", ("failed", "no room"), "6", [("name", "7", "mine:failed:_no_room")]),
        ("END,FAIL", ("finished", ""), "7", [("name", "7", "mine:finished")]),
        ("END,FAIL", None, "7", [("mail", "7", "NONE")]),
        ("END,FAIL", None, "6", []),
        ("", ("failed", "no room"), "7", []),
    ],
)
def test_slurms_mail_says_once_what_has_happened_to_the_run(
    types: str, end: tuple[str, str] | None, after: str, calls: list[tuple[str, ...]]
) -> None:
    config = Config(name="mine", layout="jobs")
    config.site.options = {"mail-type": types} if types else {}
    made: list[tuple[str, ...]] = []
    slurm: Any = SimpleNamespace(
        set_name=lambda job, name: made.append(("name", job, name)),
        set_mail_types=lambda job, types: made.append(("mail", job, types)),
    )
    EndMail(config, slurm, "7").announce(end, [Submission("8", "successor", after=after)])
    assert made == calls
