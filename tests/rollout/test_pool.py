"""Engines that join and leave while a run goes on, and prompt groups that are not held by slow
ones."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.config import Config, dump
from relax_hpc.config.changes import add_change, change_files
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import GenerateRequest, Generation
from relax_hpc.rollout.engines.pool import EngineId, assigned_engines
from relax_hpc.rollout.replica import Replica
from tests.helpers.audit import audit
from tests.helpers.faulty_engine import FaultyEngine, train_the_step, world  # noqa: F401

pytestmark = pytest.mark.run

SLOW = "0/p100"


def test_ranks_have_equal_numbers_of_engines() -> None:
    assert assigned_engines(4, 1, 2, local_rank=1) == [EngineId(2, 2), EngineId(3, 3)]
    with pytest.raises(
        ConfigError, match=r"rollout\.replicas: found 3 for 2 ranks .* multiples of 2"
    ):
        assigned_engines(3, 0, 2)


def test_an_engine_of_ones_own_is_found_by_its_path_and_a_misspelled_kind_by_the_nearest() -> None:
    config = SimpleNamespace(
        rollout=SimpleNamespace(engine=SimpleNamespace(kind="tests.rollout.test_pool:Own"))
    )
    engine = make_engine(config, 3, None, None, None)
    assert isinstance(engine, Own) and engine.place == 3
    config.rollout.engine.kind = "sgland"
    with pytest.raises(
        ConfigError, match=r"rollout\.engine\.kind: found 'sgland', .* did you mean 'sglang'\?"
    ):
        make_engine(config, 0, None, None, None)


class Own:
    """As far as `make_engine` looks at it."""

    def __init__(self, *about: object) -> None:
        self.place = about[-1]


def test_an_engine_that_takes_turns_with_the_actor_may_not_leave() -> None:
    replica = Replica.__new__(Replica)
    replica.config, replica.number = Config(colocate=True), 1
    with pytest.raises(
        ConfigError, match=r"colocate: engine 1 may not leave, .* --resume and fewer"
    ):
        replica.start_leaving()


class HeldEngine(FaultyEngine):
    """The first of them ends one episode of the prompt `slow`; the others hang until it is asked to
    leave."""

    def __init__(
        self, engines: list[HeldEngine], leave: Callable[[], object], *about: object
    ) -> None:
        super().__init__(*about)
        self.engines, self.leave, self.asked, self.ended = engines, leave, [], asyncio.Event()
        engines.append(self)

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.prompt_id == SLOW:
            self.asked.append(request.sample)
            if self is self.engines[0] and request.sample:
                await self.ended.wait()
                self.leave()
                await asyncio.Event().wait()
        made = await super().generate(request)
        if request.prompt_id == SLOW and request.draft:
            request.draft.ended = made
            self.ended.set()
        return made


def test_an_engine_leaves_and_another_joins_while_the_role_goes_on_and_nothing_is_lost(world):  # noqa: F811
    """What the first has of ticket 0 is handed on through the log: the other draws the episodes
    alone that it lacks."""
    config = world.config
    config.rollout.groups_per_request, config.rollout.requests_in_flight = 2, 1
    config.rollout.replicas, config.rollout.without = 2, ["rollout/1"]
    config.data.shuffle, config.liveness.beat_s = False, 0.05
    dump(config, world.run.config)

    def swap() -> None:
        if not change_files(world.run):
            add_change(world.run, config, "rollout", (), {"rollout.without": ["rollout/0"]})

    engines: list[HeldEngine] = []
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([], kind=functools.partial(HeldEngine, engines, swap))
    trainer.join(20.0)
    first, other = engines
    state = world.controller.state
    assert (
        state.progress.finished() and state.counts.dropped == {} and first.closed and other.closed
    )
    assert other.asked == list(range(1, config.samples_per_prompt)), (
        "the episode that had ended was in the log"
    )
    found = audit(world.run)
    assert found.problems == [] and not state.segments.lost
