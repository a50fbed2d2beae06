"""Engines that join and leave while a run goes on, and prompt groups that are not held by slow ones."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from relax_hpc.config import Config, dump
from relax_hpc.engines import make_engine
from relax_hpc.engines.engine import GenerateRequest, Generation
from relax_hpc.engines.pool import Entry, Pool, entries
from relax_hpc.errors import ConfigError
from relax_hpc.roles import rollout
from relax_hpc.roles.replica import Replica
from tests.audit import audit
from tests.test_bad_input import FaultyEngine, train_the_step, world  # noqa: F401

pytestmark = pytest.mark.run


def test_ranks_have_equal_numbers_of_engines() -> None:
    assert entries(4, 1, 2, local_rank=1) == [Entry(2, 2), Entry(3, 3)]
    with pytest.raises(ConfigError, match=r"rollout\.replicas: found 3 for 2 ranks .* multiples of 2"):
        entries(3, 0, 2)


def test_an_engine_of_ones_own_is_found_by_its_path_and_a_misspelled_kind_by_the_nearest() -> None:
    config = SimpleNamespace(rollout=SimpleNamespace(engine=SimpleNamespace(kind="tests.test_pool:Own")))
    engine = make_engine(config, 3, None, None, None)
    assert isinstance(engine, Own) and engine.place == 3
    config.rollout.engine.kind = "sgland"
    with pytest.raises(ConfigError, match=r"rollout\.engine\.kind: found 'sgland', .* did you mean 'sglang'\?"):
        make_engine(config, 0, None, None, None)


class Own:
    """As far as `make_engine` looks at it."""

    def __init__(self, *about: object) -> None:
        self.place = about[-1]


def test_an_engine_that_takes_turns_with_the_actor_may_not_leave() -> None:
    replica = Replica.__new__(Replica)
    replica.config, replica.number = Config(colocate=True), 1
    with pytest.raises(ConfigError, match=r"colocate: engine 1 may not leave, .* --resume and fewer"):
        replica.leave()


class Choreography:
    """What happens while the role runs: made known to the engines below."""

    pool: Pool
    state: object
    engines: list[HeldEngine]
    slow: frozenset[str]


class HeldEngine(FaultyEngine):
    """The first of them draws nothing of `slow` prompts before another engine, which joins, has done the others."""

    about: type[Choreography]

    async def start(self) -> None:
        self.about.engines.append(self)

    async def generate(self, request: GenerateRequest) -> Generation:
        about = self.about
        if self is about.engines[0] and request.prompt_id in about.slow:
            if 1 not in about.pool.members and len(about.engines) == 1:
                about.pool.join(Entry(1, 1))
            while about.state.counts.accepted < 6:
                await asyncio.sleep(0.001)
            if 0 in about.pool.members:
                about.pool.leave(0)
        return await super().generate(request)


def test_an_engine_joins_and_another_leaves_and_nothing_is_lost(world, monkeypatch):  # noqa: F811
    """The first has tickets 0 and 1, and is slow at 0 alone: 1 is put meanwhile, and 2 and 3 by whoever has room."""
    world.config.rollout.groups_per_request, world.config.rollout.requests_in_flight = 2, 1
    world.config.data.shuffle = False
    about = type("About", (Choreography,), {"engines": [], "slow": frozenset({"0/p100"})})
    about.state, serve = world.controller.state, rollout.Rollout.serve

    async def noted(self: rollout.Rollout) -> None:
        about.pool = self.pool
        await serve(self)

    monkeypatch.setattr(rollout.Rollout, "serve", noted)
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([], kind=type("Held", (HeldEngine,), {"about": about}))
    trainer.join(20.0)
    assert world.controller.state.progress.finished() and world.controller.state.counts.dropped == {}
    assert len(about.engines) == 2 and all(engine.closed for engine in about.engines) and not about.pool.members
    dump(world.config, world.run.config)
    assert audit(world.run).problems == []
