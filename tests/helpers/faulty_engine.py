"""A rollout role in this process, whose engine fails as a script says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relax_hpc.base.metrics.spans import Spans
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, GroupConfig
from relax_hpc.net.rendezvous.process import SignalFlag
from relax_hpc.net.rendezvous.world import World
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.process_context import Context
from relax_hpc.rewards import Reward
from relax_hpc.rewards.placement import InThread
from relax_hpc.roles import rollout as rollout_role
from relax_hpc.rollout import group_rewards, replica
from relax_hpc.rollout.engines.engine import BadAnswer, EngineFault, GenerateRequest, Generation
from relax_hpc.training.models.tiny_tokenizer import EOS_ID
from tests.helpers.faulty_data import make_data
from tests.helpers.queue_helpers import in_thread, make_run
from tests.helpers.weights_helpers import publish

STEP_RESPONSES = 8
"""Responses of a step: four prompt groups of two."""
BATCH_WAIT_S = 0.2
TRAINER_WAIT_S = 20.0

PendingRequest = tuple[GenerateRequest, asyncio.Future[Generation]]


class FaultyEngine:
    """Engine with one entry of ``script`` per batch of requests.

    A batch has the requests of a step, or those that came before the engine was idle for
    `BATCH_WAIT_S` seconds. Entries: `timeout`, `old` (weights of an older version), `nan` (in the
    second response) and `well`. After the script, all batches succeed. An entry 1 at the end of
    ``bad_updates`` lets the next update fail, after which the engine has unknown weights.
    """

    name = "faulty"
    pause_s = 0.0
    phase = ""

    def __init__(self, script: list[str], bad_updates: list[int] | None = None) -> None:
        self.script, self.bad_updates = script, bad_updates or []
        self.version: Version | None = None
        self.closed = False
        self.pending: list[PendingRequest] = []
        self.timer: asyncio.TimerHandle | None = None
        self.batches: set[asyncio.Task[None]] = set()

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.closed = True

    async def wait_dead(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def update_weights(self, directory: Path, version: Version) -> None:
        assert (directory / "model.safetensors").exists() and not self.closed
        self.version = None
        if self.bad_updates and self.bad_updates.pop():
            raise EngineFault("update_failed", f"{version}: half of it")
        self.version = version

    async def generate(self, request: GenerateRequest) -> Generation:
        assert self.version, "no request while the weights are unknown"
        loop = asyncio.get_running_loop()
        response: asyncio.Future[Generation] = loop.create_future()
        self.pending.append((request, response))
        if self.timer:
            self.timer.cancel()
        delay_s = 0.0 if len(self.pending) == STEP_RESPONSES else BATCH_WAIT_S
        self.timer = loop.call_later(delay_s, self.start_batch)
        return await response

    def start_batch(self) -> None:
        pending, self.pending = self.pending, []
        self.batches.add(asyncio.create_task(self.finish_batch(pending)))

    async def finish_batch(self, pending: list[PendingRequest]) -> None:
        results = await self.batch([request for request, _ in pending])
        for (_, response), result in zip(pending, results, strict=True):
            if response.done():
                continue
            if isinstance(result, EngineFault):
                response.set_exception(result)
            else:
                response.set_result(result)

    async def batch(self, requests: Sequence[GenerateRequest]) -> list[Generation | EngineFault]:
        entry = self.script.pop(0) if self.script else "well"
        if entry == "timeout":
            return [EngineFault("timeout", "/generate: no answer within 2 s") for _ in requests]
        if entry == "old":
            return [EngineFault("old_version", "found tokens of version 0") for _ in requests]
        versions = np.full(2, self.version.encode(), np.int32)
        results: list = [Generation([7, EOS_ID], [-0.5, -0.5], versions, "stop") for _ in requests]
        if entry == "nan":
            results[1] = BadAnswer("nan_logprob", "found nan at response token 0")
        return results


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[SimpleNamespace]:
    """A run with its queue in a thread and one published version.

    `world.rollout(script)` runs the role with a `FaultyEngine`. A parameter of the fixture is
    `eval.every`.
    """
    run = make_run(tmp_path / "run")
    settings = make_data(tmp_path)
    (tmp_path / "model").rename(run.model)
    config = Config(steps=1, prompts_per_step=4, samples_per_prompt=2)
    config.eval.every, config.queue.wait_timeout_s = getattr(request, "param", 0), 20.0
    config.data.train, config.rollout.groups_per_request = settings["data"]["train"], 4
    config.groups = {name: GroupConfig(roles=[name]) for name in ("rollout", "actor")}

    def run_rollout(
        script: list[str],
        incarnation: int = 1,
        bad_updates: list[int] | None = None,
        kind: Callable[..., FaultyEngine] = FaultyEngine,
    ) -> None:
        monkeypatch.setattr(replica, "make_engine", lambda *_: kind(script, bad_updates))
        with QueueClient(run, config, "rollout", incarnation) as client:
            spans = Spans(tmp_path / "spans.jsonl", "rollout")
            ranks = World(0, 1, 0, [{}])
            stop = SignalFlag()
            rollout_role.run(
                Context(run, config, "rollout", "rollout", incarnation, ranks, client, spans, stop)
            )

    with in_thread(run, config) as controller, QueueClient(run, config, "actor", 1) as actor:
        actor.connection.call("resume", step=0)
        publish(run, actor, Version(1, 0), {"weight": torch.zeros(1)})
        yield SimpleNamespace(
            run=run, config=config, controller=controller, actor=actor, rollout=run_rollout
        )


def use_reward(monkeypatch: pytest.MonkeyPatch, reward: Reward) -> None:
    """Let the role compute ``reward`` in its threads."""
    monkeypatch.setattr(
        group_rewards,
        "make_rewards",
        lambda name, workers, limit_s, *_: InThread(reward, limit_s),
    )


def train_the_step(actor: QueueClient, run: RunDir) -> None:
    """Act as the actor in the only step of the run."""
    leases = []
    tickets = 0
    while tickets < 4:
        claim = actor.claim("actor", 1 << 20)
        leases.append(claim.lease)
        tickets += len(claim.tickets)
    publish(run, actor, Version(1, 1), {"weight": torch.ones(1)})
    actor.connection.call("trained", step=0, leases=leases)
    actor.connection.call("checkpoint", step=1, name="i000001-step-000001", digest="")


@contextmanager
def training_actor(world: SimpleNamespace) -> Iterator[None]:
    """Train the step in a thread, and wait for the end of the thread."""
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    try:
        yield
    finally:
        trainer.join(TRAINER_WAIT_S)
