"""A run whose rollout role takes external engines, driven by a test."""

from __future__ import annotations

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
from tests.helpers.audit import audit
from tests.helpers.faulty_data import make_data
from tests.helpers.queue_helpers import in_thread, make_run
from tests.helpers.weights_helpers import publish

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


@pytest.fixture(name="scenario")
def scenario_fixture(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scenario]:
    """The parameter of the fixture is the number of steps."""
    run = make_run(tmp_path / "run")
    settings = make_data(tmp_path)
    (tmp_path / "model").rename(run.model)
    config = Config(steps=getattr(request, "param", 8), prompts_per_step=4, samples_per_prompt=2)
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


@pytest.fixture(name="model")
def model_fixture(scenario: Scenario, tmp_path: Path) -> Path:
    """Model directory of external engines, a copy of that of the run."""
    return Path(shutil.copytree(scenario.run.model, tmp_path / "external"))
