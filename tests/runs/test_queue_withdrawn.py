"""Requests that outlive whoever sent them: the hub forgets them, and takes back what it has granted
to them."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.versions import Version
from relax_hpc.commands import scale, stop
from relax_hpc.config import load_resolved
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.records import OBSERVER_INCARNATION
from relax_hpc.training.weights.subscriber import NOTHING
from tests.effort import effort
from tests.helpers.queue_helpers import in_thread, make_run, small
from tests.helpers.run_helpers import running
from tests.requirements import requires

READER = "rollout/1"
FIRST = Version(1, 0)


class World:
    """A controller in a thread, an actor, and a rollout process with one engine at a time."""

    def __init__(self, controller: Controller, actor: QueueClient, rollout: QueueClient) -> None:
        self.controller, self.actor, self.rollout = controller, actor, rollout

    def answered(self) -> None:
        """Wait until the hub has handled all requests that were sent before."""
        self.rollout.status.note("test", "answered", "")
        self.rollout.status.get().result()

    def admit(self) -> Future[Any]:
        return self.rollout.tickets.admit(READER, 2)

    def owned(self) -> set[int]:
        """Tickets that somebody works on."""
        return {ticket for ticket, group in self.controller.state.groups.items() if group.owner}

    def waiting(self) -> list[str]:
        """Operations of the requests that wait."""
        return sorted(request.op for request in self.controller.service.waiting)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    run, config = make_run(tmp_path / "run"), small(groups=2, steps=4)
    with (
        in_thread(run, config) as controller,
        QueueClient(run, config, "actor", 1) as actor,
        QueueClient(run, config, "rollout", 1) as rollout,
    ):
        actor.training.resume(0).result()
        yield World(controller, actor, rollout)


async def cancelled(future: Future[Any]) -> None:
    """Wait for ``future`` for a moment, and no longer."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.wrap_future(future)


def publish(world: World) -> None:
    world.actor.weights.publish(FIRST, "digest").result()


def serve(world: World, version: Version) -> None:
    world.rollout.weights.serve(READER, version).result()


def test_a_request_of_an_engine_that_has_left_gets_nothing_when_another_comes_back(
    world: World,
) -> None:
    """Under the same name, within one incarnation: its tickets would never be generated."""
    serve(world, NOTHING)
    asyncio.run(cancelled(world.admit()))
    world.answered()
    assert world.waiting() == []
    publish(world)
    serve(world, FIRST)
    again = world.admit().result(10.0)
    assert set(again.tickets) == world.owned() == {0, 1}


def test_tickets_that_were_granted_as_the_engine_left_are_given_to_the_next(world: World) -> None:
    """The answer was on its way, and nobody has read it."""
    publish(world)
    serve(world, FIRST)
    granted = world.admit()
    assert granted.result(10.0).tickets == [0, 1]
    granted.cancel()
    granted.cancel()
    world.answered()
    assert world.owned() == set()
    assert world.admit().result(10.0).tickets == [0, 1]


def test_an_engine_that_leaves_and_returns_at_any_moment_gets_all_tickets(world: World) -> None:
    """It leaves while its request waits, as `Replica.unless_leaving` does. At the same time another
    process returns the tickets, so that the hub grants them before, between and after the requests
    of the engine that leaves."""
    chance = random.Random(5)
    publish(world)
    granted = 0
    with QueueClient(world.rollout.run, world.rollout.config, "rollout", 1) as other:
        for _ in range(effort(20, 500)):
            other.weights.serve("rollout/0", FIRST).result()
            admission = other.tickets.admit("rollout/0", 2).result(10.0)
            assert admission and set(admission.tickets) == {0, 1}
            serve(world, FIRST)
            waiting = world.admit()
            delay_s = chance.uniform(-0.003, 0.003)
            returning = threading.Timer(
                max(0.0, delay_s), return_tickets, (other, admission.tickets)
            )
            returning.start()
            time.sleep(max(0.0, -delay_s))
            world.rollout.weights.serve(READER, NOTHING)
            granted += waiting.done()
            waiting.cancel()
            serve(world, FIRST)
            again = set[int]()
            while len(again) < 2:
                again.update(world.admit().result(10.0).tickets)
            returning.join()
            return_tickets(world.rollout, again)
    assert world.owned() == set() and world.waiting() == []
    assert granted, "the request was never answered before it was withdrawn"


def return_tickets(client: QueueClient, tickets: Iterable[int]) -> None:
    for ticket in tickets:
        client.tickets.return_ticket(ticket).result(10.0)


def test_a_claim_that_nobody_waits_for_is_released(world: World) -> None:
    waits = world.actor.submit_claim("actor", 2)
    asyncio.run(cancelled(waits))
    world.actor.status.get().result()
    assert world.waiting() == []


@pytest.mark.parametrize("op", ["next_version", "step_generated"])
def test_long_polls_of_an_engine_end_with_it(world: World, op: str) -> None:
    ask = {
        "next_version": lambda: world.rollout.weights.newer(FIRST, evaluator=READER),
        "step_generated": lambda: world.rollout.training.step_generated(0),
    }
    publish(world)
    asyncio.run(cancelled(ask[op]()))
    world.answered()
    assert world.waiting() == []


def test_other_requests_are_finished_whoever_waits(world: World) -> None:
    """A put or a note that was sent counts, also if its sender was cancelled."""
    noted = world.rollout.status.note("test", "name", "reason")
    noted.cancel()
    noted.result(10.0)
    assert world.controller.state.counts.noted["test/reason"] == 1


@pytest.mark.run
def test_engines_that_leave_and_come_back_take_no_tickets_along(tmp_path: Path) -> None:
    """While they wait for tickets, as training is the bottleneck."""
    requires("mpi", "torch", "megatron", "transformers")
    rollout = {"replicas": 2, "engine": {"kind": "simulated", "simulated": {"response_s": 0.01}}}
    settings = {
        "steps": 100_000,
        "max_staleness": 1,
        "liveness": {"beat_s": 0.2},
        "rollout": rollout,
        "service": {"enabled": True},
    }
    with running(tmp_path, settings) as live:
        live.wait_for_step(1, 120)
        with QueueClient(
            live.run, load_resolved(live.run.root), "observer", OBSERVER_INCARNATION
        ) as hub:
            for _ in range(effort(3, 50)):
                scale.remove_engines(str(live.run.root), "rollout", "1")
                live.wait_until(lambda: not serves(hub), "engine 1 has left", 90)
                scale.remove_engines(str(live.run.root), "rollout", "")
                live.wait_until(lambda: serves(hub), "engine 1 is back", 90)
                goal = state(hub)["trained_steps"] + 3
                live.wait_until(
                    lambda goal=goal: state(hub)["trained_steps"] >= goal, "steps go on", 60
                )
                assert state(hub)["oldest_s"]["generating"] < 30
        assert live.incarnations("rollout") == 1
        stop.main(str(live.run.root), now=False)
        assert live.wait(60) == 130


def state(hub: QueueClient) -> dict[str, Any]:
    return hub.status.get().result().message()


def serves(hub: QueueClient) -> bool:
    return state(hub)["readers"].get(READER, str(NOTHING)) != str(NOTHING)
