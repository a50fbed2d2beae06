"""`relax-hpc track` sends metrics.jsonl to a tracker, whatever happens to either of them."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY, ConfigError
from relax_hpc.base.metrics.trackers import Tracker, tracker_class
from relax_hpc.base.metrics.writer import MetricsWriter
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.config import dump, load
from relax_hpc.ops import track
from relax_hpc.ops.observe.status import status
from relax_hpc.ops.observe.status_view import details
from tests.ops.track_services import CALLS

STEPS, BACK_TO = 6, 3


@pytest.fixture
def run(run_dir: Path) -> RunDir:
    """A run that went back to step 3 after step 5, and whose writer was killed within a line."""
    run = RunDir(run_dir)
    task = "relax_hpc.examples.tasks.sort_digits:SortDigits"
    dump(load([], {"name": "mine", "data.task": task}), run.config)
    with MetricsWriter(run.root, incarnation=1) as metrics:
        for step in range(STEPS):
            metrics.write(step, {"reward/mean": step}, time=float(step))
        metrics.write(BACK_TO, {"eval/held_out/reward": 0.5}, time=10.0)
        metrics.rolled_back(BACK_TO)
        for step in range(BACK_TO, STEPS):
            metrics.write(step, {"reward/mean": 10 + step}, time=20.0 + step)
    with run.metrics.open("a") as file:
        file.write('{"step": 6, "half')
    return run


def service(name: str) -> str:
    return f"tests.ops.track_services:{name}"


def points(run: RunDir) -> dict[str, dict[int, tuple[int, dict[str, float]]]]:
    """Number -> (step, values), by the identity of the service's run; equal repetitions once."""
    found: dict[str, dict[int, tuple[int, dict[str, float]]]] = {}
    for text in (run.root / CALLS).read_text().splitlines():
        identity, call, *arguments = json.loads(text)
        if call == "send":
            number, step, values = arguments
            point = found.setdefault(identity, {}).setdefault(number, (step, values))
            assert point == (step, values), "a repetition has the same number"
    return found


def test_a_rollback_begins_a_run_of_the_service_with_the_steps_that_count(run: RunDir) -> None:
    assert track.main(str(run.root), service("PointService"), once=True) == EXIT_DONE
    first, second = points(run)
    assert second == f"{first}-r1"
    assert [step for step, _ in points(run)[first].values()] == [*range(STEPS), BACK_TO]
    rows = points(run)[second]
    assert list(rows) == sorted(rows), "wandb refuses smaller numbers"
    assert [(step, values.get("reward/mean")) for step, values in rows.values()] == [
        *((0, 0.0), (1, 1.0), (2, 2.0), (3, None)),
        *((3, 13.0), (4, 14.0), (5, 15.0)),
    ]
    calls = [json.loads(text) for text in (run.root / CALLS).read_text().splitlines()]
    assert [call[1:] for call in calls if call[1] != "send"] == [
        *(["open", "mine"], ["close", BACK_TO], ["open", "mine-r1"], ["close", None]),
    ]
    # A second command has nothing to log.
    assert track.main(str(run.root), service("PointService"), once=True) == EXIT_DONE
    assert len((run.root / CALLS).read_text().splitlines()) == len(calls)


def test_a_tracker_that_is_killed_repeats_the_same_points(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(track, "FIRST_PAUSE_S", 0.01)
    assert track.main(str(run.root), service("KilledService"), once=True) == EXIT_DONE
    first, second = points(run)
    assert len(points(run)[first]) == STEPS + 1 and len(points(run)[second]) == STEPS + 1
    shown = capsys.readouterr().err
    assert "failure 2: its process was ended by signal 9; tries again" in shown
    assert shown.endswith("all lines are logged, 2 failures in all\n")


def test_a_service_without_network_is_named_counted_and_fed_later(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(track, "FIRST_PAUSE_S", 0.01)
    name = service("LostService")
    assert track.main(str(run.root), name, once=True) == EXIT_RETRY
    shown = capsys.readouterr().err
    assert f"{name}: failure 3: ConnectionError: the service does not answer;" in shown
    assert "bytes of metrics are not logged" in shown
    ((_, follower, missing),) = track.follower_states(run)
    assert (follower.failures, missing) == (3, track.complete_bytes(run.metrics))
    assert [line for line in details(status(run, 0.1)) if line.startswith("tracker")] == [
        f"tracker {name.replace(':', '.')}: {missing} bytes of metrics.jsonl behind, relax-hpc track "
        "does not run, 3 failures, the last: ConnectionError: the service does not answer"
    ]
    (run.root / "network").touch()
    assert track.main(str(run.root), name, once=True) == EXIT_DONE
    ((_, follower, missing),) = track.follower_states(run)
    assert (follower.failures, missing) == (3, 0)
    assert not track.is_fresh(follower)


def test_it_follows_a_run_until_it_has_finished(run: RunDir) -> None:
    write_json(run.finished, {"steps": STEPS})
    assert track.main(str(run.root), service("PointService"), once=False) == EXIT_DONE
    assert len(points(run)) == 2


def test_the_newest_process_has_the_claim(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    old = track.Claim(run, "wandb")
    assert old.holds() and old.former is None
    new = track.Claim(run, "wandb")
    assert new.former and new.former.owner == old.state.owner, "it must end first"
    assert new.holds()
    monkeypatch.setattr(old, "_beat_at", 0.0)
    assert not old.holds()
    old.end()
    follower = track.read_follower(run, "wandb")
    assert follower and follower.owner == new.state.owner and track.is_fresh(follower)
    # The process ends without a mark, such as by kill -9 on this machine.
    follower.pid = 2**22 + 1
    assert not track.is_fresh(follower)
    follower.host, follower.beat_at = "elsewhere", time.time() - 60.0
    assert not track.is_fresh(follower)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wand", "--to: found 'wand', allowed: wandb, trackio, mlflow or package.module:Class"),
        ("wandb", "--to: 'wandb': the package wandb is not installed; pip install wandb"),
        ("pathlib:Path", "--to: 'pathlib:Path': found no class derived from"),
    ],
)
def test_a_wrong_name_is_an_error_of_one_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError) as error:
        track.main(str(run.root), name, once=True)
    assert str(error.value).startswith(says)


def test_a_tracker_of_the_hub_is_not_fed_twice(run: RunDir) -> None:
    name = service("PointService")
    task = "relax_hpc.examples.tasks.sort_digits:SortDigits"
    dump(load([], {"metrics.trackers": [name], "data.task": task}), run.config)
    with pytest.raises(ConfigError, match=r"metrics\.trackers of the run names already"):
        track.main(str(run.root), name, once=True)


def fed(tracker: Tracker) -> None:
    """Give a tracker a line, a rollback, and another line, as the process of a tracker does."""
    tracker.line_number = 0
    tracker.log(0, {"reward/mean": 0.0, "eval/held_out/pass@4": math.nan}, 5.0)
    tracker.flush()
    tracker.line_number = STEPS + 1
    tracker.rolled_back(BACK_TO)
    tracker.line_number = STEPS + 2
    tracker.log(BACK_TO, {"reward/mean": 1.0}, 6.0)
    tracker.flush()
    tracker.finish()


def make(name: str, run: RunDir, monkeypatch: pytest.MonkeyPatch, package: Any) -> Tracker:
    """Tracker of a service whose ``package`` is replaced."""
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "sqlalchemy" else name
    )
    settings = {"name": "mine", "steps": 6, "site": {"account": "a"}, "judge": {"api_key": "k"}}
    return tracker_class(name)(run.root, settings)


def test_wandb_gets_rising_steps_and_no_private_settings(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []

    def init(**options: Any) -> Any:
        logged: list[tuple[int, dict[str, float]]] = []
        service_run = SimpleNamespace(
            options=options,
            logged=logged,
            tags=(),
            summary={},
            define_metric=lambda *_, **__: None,
            log=lambda values, step: logged.append((step, values)),
            finish=lambda: None,
        )
        runs.append(service_run)
        return service_run

    package = SimpleNamespace(init=init, Settings=dict, api=SimpleNamespace(api_key=None))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    fed(make("wandb", run, monkeypatch, package))
    old, new = runs
    assert old.options["mode"] == "offline" and old.options["config"] == {"steps": 6}
    assert (old.options["name"], new.options["name"]) == ("mine", "mine-r1")
    assert old.tags == ("rolled back",) and old.summary == {"rolled_back_to": BACK_TO}
    assert [step for step, _ in new.logged] == [0, 1, 2, 3, STEPS + 2]
    assert [values["train/step"] for _, values in new.logged] == [0, 1, 2, 3, 3]


def test_mlflow_gets_names_that_it_accepts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_hpc.base.metrics.trackers import mlflow_tracker

    made: list[str] = []
    names: list[str] = []

    class MlflowClient:
        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="1")

        def search_runs(self, *_: Any, **__: Any) -> list[Any]:
            return []

        def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
            made.append(run_name)
            return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            names.extend(metric[0] for metric in metrics)

        def set_tag(self, *_: Any) -> None:
            pass

        set_terminated = set_tag

    package: Any = ModuleType("mlflow")
    package.MlflowClient = MlflowClient
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric = entities.Param = lambda *values: values
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(mlflow_tracker, "_RETRIES", "0")
    fed(make("mlflow", run, monkeypatch, package))
    assert made == ["mine", "mine-r1"] and "eval/held_out/pass_at_4" in names


def test_trackio_only_warns_and_that_is_a_failure(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    logged: list[int] = []

    def log(values: dict[str, float], step: int) -> None:
        logged.append(step)
        if len(logged) == 3:
            warnings.warn("trackio failed to flush: disk is full", stacklevel=1)

    package = SimpleNamespace(init=lambda **_: SimpleNamespace(log=log, finish=lambda: None))
    monkeypatch.setenv("TRACKIO_DIR", str(run.root))
    tracker = make("trackio", run, monkeypatch, package)
    with warnings.catch_warnings(), pytest.raises(Exception, match="disk is full"):
        fed(tracker)
