"""Engines that other programs started join a run by URL, are compared, serve, are lost, and leave."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_hpc.base.versions import Version
from relax_hpc.queue.operations import Operation
from relax_hpc.rollout.external import engine
from relax_hpc.rollout.external.member import Backoff
from tests.effort import effort
from tests.helpers.external_scenario import (  # noqa: F401
    Scenario,
    model_fixture,
    scenario_fixture,
)
from tests.helpers.external_server import Behaviour, external_server

pytestmark = pytest.mark.run


def test_an_engine_joins_by_url_serves_and_leaves(
    scenario: Scenario, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    behaviour = Behaviour(model, key="secret", pause_s=0.01)
    (tmp_path / "key").write_text("secret\n")
    scenario.config.rollout.external.key_file = str(tmp_path / "key")

    def act() -> None:
        operation = scenario.ended(scenario.scale("scale_out", engine_urls=[url]))
        states = [state for state, _ in operation.history]
        assert operation.state == "ACTIVE" and states == sorted(states, key=ORDER.index), operation
        assert scenario.engine().state == "active"
        served = scenario.controller.state.weights.readers["rollout/1000"][1]
        assert str(served) == behaviour.version == "i000001-v000000"
        scenario.train()
        scenario.train()
        assert behaviour.generated > 0
        removing = scenario.scale("scale_in", engines=["rollout/1000"])
        assert scenario.ended(removing).state == "COMPLETED"
        generated = behaviour.generated
        scenario.train()
        assert behaviour.generated == generated and scenario.engine().state == "left"

    with external_server(behaviour) as url:
        scenario.play(monkeypatch, act)


def test_an_engine_of_another_node_reads_versions_from_the_run_directory(
    scenario: Scenario, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaviour = Behaviour(model)
    monkeypatch.setattr(engine, "is_local", lambda _: False)
    folder = scenario.run.root / "external"
    (folder / "i000001-v000900").mkdir(parents=True)

    def act() -> None:
        assert scenario.ended(scenario.scale("scale_out", engine_urls=[url])).state == "ACTIVE"
        for _ in range(4):
            scenario.train()
        readers = scenario.controller.state.weights.readers
        newest = Version(1, scenario.trained)
        scenario.until(lambda: readers["rollout/1000"][1], lambda version: version == newest)
        versions = [f"i000001-v{number:06d}" for number in range(5)]
        loaded = [Path(path).name for path in behaviour.updates]
        assert loaded[0] == versions[0] and loaded[-1] == versions[-1]
        assert {Path(path).parent for path in behaviour.updates} == {folder}
        assert len(list(folder.iterdir())) <= 2, "older ones and those of another role are removed"

    with external_server(behaviour) as url:
        scenario.play(monkeypatch, act)


ORDER = [
    *("PENDING", "CONNECTING", "HEALTH_CHECKING", "PREFLIGHT", "WEIGHT_SYNCING", "READY", "ACTIVE")
]


def refused(scenario: Scenario, behaviour: Behaviour) -> Operation:
    """The end of a scale-out by a server that may not join."""
    with external_server(behaviour) as url:
        operation = scenario.ended(scenario.scale("scale_out", engine_urls=[url]))
    assert operation.state == "FAILED" and not behaviour.generated
    return operation


def test_an_engine_of_another_model_or_with_other_flags_is_refused(
    scenario: Scenario, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what differs. The run continues, and a number is never used twice."""

    def act() -> None:
        config = json.loads((model / "config.json").read_bytes())
        other = model.with_name("other")
        shutil.copytree(model, other)
        (other / "config.json").write_text(json.dumps(config | {"rope_theta": 100}))
        operation = refused(scenario, Behaviour(other))
        assert operation.reason == "model_mismatch"
        assert "config.json: rope_theta: found 100, expected" in operation.detail
        (other / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
        with (other / "tokenizer.json").open("a") as file:
            file.write(" ")
        operation = refused(scenario, Behaviour(other))
        assert operation.reason == "model_mismatch" and "tokenizer.json: found" in operation.detail
        operation = refused(scenario, Behaviour(model, logprob_shift=-0.01))
        assert operation.reason == "model_mismatch" and "differ by 0.01 nats" in operation.detail
        flags = {"stream_interval": 4096, "random_seed": scenario.config.seed, "dtype": "float32"}
        operation = refused(scenario, Behaviour(model, flags=flags))
        assert operation.reason == "flags_missing"
        for name in ("incremental_streaming_output", "stream_interval", "random_seed"):
            assert f"{name}: found" in operation.detail
        operation = refused(scenario, Behaviour(model, key="secret"))
        assert operation.reason == "unauthorized" and "key_file" in operation.detail
        operation = refused(scenario, Behaviour(model, is_other_service=True))
        assert operation.reason == "not_an_engine"
        numbers = [engine.number for engine in scenario.present()]
        assert numbers == list(range(1000, 1006))
        noted = scenario.controller.state.counts.noted
        assert noted["engine_refused/model_mismatch"] == 3
        assert noted["engine_refused/flags_missing"] == 1

    scenario.play(monkeypatch, act)


def test_an_engine_that_lies_or_is_not_there_does_not_stop_the_run(
    scenario: Scenario, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports another version than it was given, has scored other tokens, or does not answer
    until the deadline of the operation."""

    def act() -> None:
        with external_server(Behaviour(model, reported_version="i000001-v000007")) as url:
            id = scenario.scale("scale_out", engine_urls=[url], timeout_secs=1.0)
            assert scenario.ended(id).reason == "timeout"
            assert scenario.noted("engine_lost/update_failed")
        scenario.until(lambda: scenario.engine(), lambda found: found.state == "left")
        with external_server(Behaviour(model, token_shift=1)) as url:
            id = scenario.scale("scale_out", engine_urls=[url], timeout_secs=1.0)
            assert scenario.ended(id).reason == "timeout"
            assert scenario.noted("engine_lost/other_prompt")
        scenario.until(lambda: scenario.engine(1001), lambda found: found.state == "left")
        id = scenario.scale("scale_out", engine_urls=[url], timeout_secs=1.0)
        assert scenario.ended(id).state == "FAILED" and scenario.noted("engine_lost/connection")
        scenario.until(lambda: scenario.engine(1002), lambda found: found.state == "left")
        scenario.train()

    scenario.play(monkeypatch, act)


def break_stream(behaviour: Behaviour) -> None:
    """As a server that is killed while it generates."""
    behaviour.breaks_streams = True


def freeze(behaviour: Behaviour) -> None:
    behaviour.is_frozen = True


def let_hang(behaviour: Behaviour) -> None:
    """It answers heartbeats, and generates nothing."""
    behaviour.hangs = True


def change_weights(behaviour: Behaviour) -> None:
    """As another run would that also uses the server."""
    behaviour.version = "i000009-v000009"


def answer_badly(behaviour: Behaviour) -> None:
    behaviour.logprob_shift = 20.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (break_stream, "connection"),
        (freeze, "dead"),
        (let_hang, "timeout"),
        (change_weights, "unknown_version"),
        (answer_badly, "nan_logprob"),
    ],
)
def test_an_engine_that_fails_is_lost_and_comes_back_under_its_number(
    scenario: Scenario,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Behaviour], None],
    reason: str,
) -> None:
    behaviour = Behaviour(model)
    if fault is let_hang:
        scenario.config.rollout.engine.request_timeout_s = 0.3

    def act() -> None:
        assert scenario.ended(scenario.scale("scale_out", engine_urls=[url])).state == "ACTIVE"
        scenario.train()
        newest = Version(1, scenario.trained)
        readers = scenario.controller.state.weights.readers
        scenario.until(lambda: readers["rollout/1000"][1], lambda version: version == newest)
        fault(behaviour)
        # A new version would set the weights right again.
        for _ in range(0 if fault is change_weights else 2):
            scenario.train()
        lost = scenario.until(
            lambda: scenario.engine(), lambda found: (found.state, found.reason) == LOST
        )
        assert lost.next_try > lost.since and lost.wanted
        behaviour.breaks_streams = behaviour.is_frozen = behaviour.hangs = False
        behaviour.logprob_shift = 0.0
        scenario.train()
        scenario.until(lambda: scenario.engine(), lambda found: found.state == "active")
        generated = behaviour.generated
        scenario.train()
        scenario.train()
        assert behaviour.generated > generated

    LOST = ("lost", reason)
    with external_server(behaviour) as url:
        scenario.play(monkeypatch, act)


OPERATIONS = effort(6, 50)


@pytest.mark.parametrize("scenario", [OPERATIONS + 4], indirect=True)
def test_rows_are_trained_once_whatever_happens_to_engines(
    scenario: Scenario, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three engines are added, removed and broken at random, one event in each step. `play` audits
    the run."""
    chance = random.Random(7)
    behaviours = [
        Behaviour(model, pause_s=0.01, flags=Behaviour(model).flags | {"random_seed": 70 + k})
        for k in range(3)
    ]
    scenario.config.rollout.engine.request_timeout_s = 1.0

    def scale(url: str) -> None:
        engines = [engine for engine in scenario.present() if engine.url == url and engine.wanted]
        if engines:
            scenario.ended(scenario.scale("scale_in", engines=[engines[0].name]))
        else:
            scenario.ended(scenario.scale("scale_out", engine_urls=[url], timeout_secs=3.0))

    def act() -> None:
        for url in urls:
            scale(url)
        for _ in range(OPERATIONS):
            number = chance.randrange(3)
            behaviour = behaviours[number]
            event = chance.choice(["scale", "scale", "is_frozen", "breaks_streams", "hangs"])
            if event == "scale":
                scale(urls[number])
            else:
                setattr(behaviour, event, not getattr(behaviour, event))
            scenario.train()
        numbers = [engine.number for engine in scenario.present()]
        assert len(numbers) == len(set(numbers))

    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(external_server(behaviour)) for behaviour in behaviours]
        scenario.play(monkeypatch, act)


def test_pauses_between_joins_grow_and_are_reset_by_service() -> None:
    backoff = Backoff()
    assert [backoff.pause_s(0.0) for _ in range(11)] == [2.0**k for k in range(9)] + [300.0] * 2
    assert backoff.pause_s(299.0) == 300.0 and backoff.pause_s(301.0) == 1.0
