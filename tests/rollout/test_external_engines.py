"""Engines that other programs started join a run by URL, are compared, serve, are lost, and leave."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_hpc.base.metrics.spans import Spans
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import dump
from relax_hpc.config.schema import Config, GroupConfig
from relax_hpc.net.rendezvous.process import SignalFlag
from relax_hpc.net.rendezvous.world import World
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.operations import ExternalEngine, Operation
from relax_hpc.queue.plan import SUPERVISOR
from relax_hpc.queue.process_context import Context
from relax_hpc.roles import rollout
from relax_hpc.rollout import replica
from relax_hpc.rollout.engines.simulated_engine import SimulatedEngine
from relax_hpc.rollout.external.member import Backoff
from tests.helpers.audit import audit
from tests.helpers.external_server import Behaviour, external_server
from tests.helpers.faulty_data import make_data
from tests.helpers.queue_helpers import in_thread, make_run
from tests.helpers.weights_helpers import publish

pytestmark = pytest.mark.run

LIMIT_S = 60.0
"""Seconds until a condition must be true."""


class Scenario:
    """A run whose rollout role is in the main thread. A second thread is the actor, the supervisor
    and a client of the operations."""

    def __init__(self, run: RunDir, config: Config, controller: Controller) -> None:
        self.run, self.config, self.controller = run, config, controller
        self.actor = QueueClient(run, config, "actor", 1)
        self.supervisor = QueueClient(run, config, SUPERVISOR, 1)
        self.operations = self.supervisor.operations
        self.trained = 0
        self.failure: BaseException | None = None

    def close(self) -> None:
        self.actor.close()
        self.supervisor.close()

    def play(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        """Run the rollout role while ``act`` runs. All steps that remain are trained after it."""
        monkeypatch.setattr(
            replica,
            "make_engine",
            lambda *_: SimulatedEngine(self.config, 0, self.run.model, Version(0, 0)),
        )
        driver = threading.Thread(target=self._drive, args=(act,))
        driver.start()
        with QueueClient(self.run, self.config, "rollout", 1) as client:
            spans = Spans(self.run.root / "spans.jsonl", "rollout")
            world, stop = World(0, 1, 0, [{}]), SignalFlag()
            rollout.run(
                Context(self.run, self.config, "rollout", "rollout", 1, world, client, spans, stop)
            )
        driver.join(LIMIT_S)
        if self.failure:
            raise self.failure
        report = audit(self.run)
        assert report.problems == []
        state = self.controller.state
        assert state.progress.finished() and state.counts.dropped == {}

    def _drive(self, act: Callable[[], None]) -> None:
        try:
            self.operations.report_groups({"rollout": {"engines": 1}}).result(LIMIT_S)
            act()
        except BaseException as failure:
            self.failure = failure
        while self.trained < self.config.steps:
            self.train()

    def train(self) -> None:
        """Act as the actor in one step."""
        actor, step, leases, tickets = self.actor, self.trained, [], 0
        while tickets < 4:
            claim = actor.claim("actor", 1 << 20)
            assert claim, "the run is not finished"
            leases.append(claim.lease)
            tickets += len(claim.tickets)
        self.trained += 1
        publish(self.run, actor, Version(1, self.trained), {"weight": torch.ones(1)})
        actor.connection.call("trained", step=step, leases=leases)
        if self.trained == self.config.steps:
            name = f"i000001-step-{self.trained:06d}"
            actor.connection.call("checkpoint", step=self.trained, name=name, digest="")

    def scale(self, kind: str, **body: Any) -> str:
        return self.operations.create(kind, body).result(LIMIT_S).operation.id

    def ended(self, id: str) -> Operation:
        return self.until(lambda: self.operation(id), lambda operation: operation.is_final)

    def operation(self, id: str) -> Operation:
        return self.operations.get(id).result(LIMIT_S)

    def present(self) -> Sequence[ExternalEngine]:
        return self.operations.present().result(LIMIT_S).external

    def engine(self, number: int = 1000) -> ExternalEngine:
        return next(engine for engine in self.present() if engine.number == number)

    def noted(self, fault: str) -> int:
        return self.controller.state.counts.noted[fault]

    def until(self, read: Callable[[], Any], holds: Callable[[Any], Any]) -> Any:
        """The first value for which ``holds`` is true. Steps are trained meanwhile, but the last
        one is kept for the end."""
        deadline = time.monotonic() + LIMIT_S
        while not holds(value := read()):
            assert time.monotonic() < deadline, f"still {value}"
            threading.Event().wait(0.02)
        return value


@pytest.fixture
def scenario(tmp_path: Path) -> Iterator[Scenario]:
    run = make_run(tmp_path / "run")
    settings = make_data(tmp_path)
    (tmp_path / "model").rename(run.model)
    config = Config(steps=8, prompts_per_step=4, samples_per_prompt=2)
    config.eval.every, config.queue.wait_timeout_s, config.liveness.beat_s = 0, 20.0, 0.1
    config.groups = {name: GroupConfig(roles=[name]) for name in ("rollout", "actor")}
    config.data.train, config.rollout.max_new_tokens = settings["data"]["train"], 4
    config.rollout.groups_per_request = config.rollout.requests_in_flight = 1
    config.rollout.engine.kind = "simulated"
    config.rollout.engine.simulated.response_s = 0.05
    config.rollout.engine.request_timeout_s = 5.0
    external = config.rollout.external
    external.heartbeat_s, external.heartbeat_timeout_s = 0.1, 0.2
    dump(config, run.config)
    with in_thread(run, config) as controller:
        scenario = Scenario(run, config, controller)
        scenario.actor.connection.call("resume", step=0)
        publish(run, scenario.actor, Version(1, 0), {"weight": torch.zeros(1)})
        yield scenario
        scenario.close()


@pytest.fixture
def model(scenario: Scenario, tmp_path: Path) -> Path:
    """Model directory of external engines, a copy of that of the run."""
    return Path(shutil.copytree(scenario.run.model, tmp_path / "external"))


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
        scenario.until(lambda: scenario.engine(), lambda engine: engine.state == "left")
        with external_server(Behaviour(model, token_shift=1)) as url:
            id = scenario.scale("scale_out", engine_urls=[url], timeout_secs=1.0)
            assert scenario.ended(id).reason == "timeout"
            assert scenario.noted("engine_lost/other_prompt")
        scenario.until(lambda: scenario.engine(1001), lambda engine: engine.state == "left")
        id = scenario.scale("scale_out", engine_urls=[url], timeout_secs=1.0)
        assert scenario.ended(id).state == "FAILED" and scenario.noted("engine_lost/connection")
        scenario.until(lambda: scenario.engine(1002), lambda engine: engine.state == "left")
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
            lambda: scenario.engine(), lambda engine: (engine.state, engine.reason) == LOST
        )
        assert lost.next_try > lost.since and lost.wanted
        behaviour.breaks_streams = behaviour.is_frozen = behaviour.hangs = False
        behaviour.logprob_shift = 0.0
        scenario.train()
        scenario.until(lambda: scenario.engine(), lambda engine: engine.state == "active")
        generated = behaviour.generated
        scenario.train()
        scenario.train()
        assert behaviour.generated > generated

    LOST = ("lost", reason)
    with external_server(behaviour) as url:
        scenario.play(monkeypatch, act)


def test_pauses_between_joins_grow_and_are_reset_by_service() -> None:
    backoff = Backoff()
    assert [backoff.pause_s(0.0) for _ in range(11)] == [2.0**k for k in range(9)] + [300.0] * 2
    assert backoff.pause_s(299.0) == 300.0 and backoff.pause_s(301.0) == 1.0
