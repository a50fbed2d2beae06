"""Turns on shared devices: who waits for whom, over deaths of either side and of the controller."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.controller.state.queue_state import QueueState
from tests.helpers.queue_helpers import Roles, in_thread, make_run, small


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A queue of a run of two engines, and its roles."""
    config = small()
    config.colocate, config.rollout.replicas = True, 2
    run = make_run(tmp_path / "run")
    with in_thread(run, config) as hub, Roles(run, config) as roles:
        yield SimpleNamespace(run=run, config=config, hub=hub, roles=roles)


def take(client: QueueClient, side: str, step: int = 0) -> Future:
    return client.connection.submit("take_turn", side=side, step=step)


def rest(roles: Roles, number: int, step: int) -> None:
    roles["rollout"].connection.call(
        "serve", reader=f"rollout/{number}", version=str(roles.version)
    )
    roles["rollout"].connection.call("rest", reader=f"rollout/{number}", step=step)


def test_engines_wait_for_the_actor_and_the_actor_for_all_engines(world: SimpleNamespace) -> None:
    roles = world.roles
    engines = take(roles["rollout"], "engines")
    assert roles.waits("waits for the actor to free the devices")
    roles.version = roles.start()
    roles["actor"].connection.call("end_turn")
    engines.result(timeout=60)
    actor, generated = (
        take(roles["actor"], "actor"),
        roles["rollout"].connection.submit("step_generated", step=0),
    )
    assert roles.waits("waits for engines to free the devices: 0 of 2 have")
    assert roles.waits("waits for the rows of step 0")
    roles.generate(roles.version)
    generated.result(timeout=60)
    rest(roles, 0, 0)
    assert roles.waits("1 of 2 have") and not actor.done()
    rest(roles, 1, 0)
    actor.result(timeout=60)
    again = take(roles["rollout"], "engines")
    assert roles.waits("waits for the actor to free the devices") and not again.done()


def test_what_engines_did_in_a_former_step_or_lineage_is_no_rest(world: SimpleNamespace) -> None:
    roles = world.roles
    roles.version = roles.start()
    roles["actor"].connection.call("end_turn")
    for number in range(2):
        rest(roles, number, 0)
    later = take(roles["actor"], "actor", step=1)
    assert roles.waits("0 of 2 have") and not later.done()
    for number in range(2):
        rest(roles, number, 1)
    later.result(timeout=60)
    roles["actor"].connection.call("end_turn")
    roles["actor"].connection.call("resume", step=0)
    assert world.hub.state.device_turns.freed_after == {"rollout/0": 1, "rollout/1": 1}, (
        "the same incarnation changes nothing"
    )
    with QueueClient(world.run, world.config, "actor", 2) as actor:
        actor.connection.call("resume", step=0)
        assert (
            world.hub.state.device_turns.freed_after == {}
            and world.hub.state.device_turns.side == "actor"
        )


def test_the_turn_survives_the_controller(world: SimpleNamespace) -> None:
    roles = world.roles
    roles.version = roles.start()
    roles["actor"].connection.call("end_turn")
    rest(roles, 0, 0)
    state = QueueState.load(world.hub.state.plan, world.hub.state.dump())
    assert state.device_turns.side == "engines" and state.device_turns.freed_after == {
        "rollout/0": 0
    }
