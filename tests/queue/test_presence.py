"""Clocks stand while a group is not there, loads, or works; they run when all are there and nobody
does anything."""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.disk_waits import WAITS
from relax_hpc.base.errors import DeadlineError
from relax_hpc.cluster.sandbox.processes import until
from relax_hpc.queue import presence
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.client.training import TrainingRequests
from relax_hpc.queue.presence import GroupPresence
from relax_hpc.rollout.replica import FOR_TURN, Replica
from relax_hpc.rollout.rollout_rank import Rollout
from tests.helpers.queue_helpers import BUDGET, in_thread, make_run, small

GROUPS = ("hub", "rollout", "actor")


class World:
    """Beats of the groups, and a clock."""

    def __init__(self) -> None:
        self.now, self.over = 1000.0, set[tuple[str, int]]()
        self.presence = GroupPresence(GROUPS, 30.0, self.now)

    def look(self, *beats: dict[str, Any], seconds: float = 2.0) -> dict[str, str]:
        """Whom the others wait for after some seconds, and why."""
        self.now += seconds
        found = {
            f"{number}": {"incarnation": 1, "at": self.now} | beat
            for number, beat in enumerate(beats)
        }
        self.presence.update(found, lambda owner: int(owner in self.over), self.now)
        return {name: why for name, (why, _) in self.presence.awaited_groups.items()}


def test_a_group_is_waited_for_until_it_beats_and_has_loaded() -> None:
    world = World()
    actor, rollout = {"group": "actor"}, {"group": "rollout"}
    assert world.look(actor) == {"rollout": "is not there"} and world.presence.paused_s == 2.0
    assert world.look(actor, rollout | {"loads": True}) == {"rollout": "is loading"}
    assert world.presence.report(world.now)["rollout"]["since_s"] == 2.0, (
        "since it was first missed"
    )
    assert world.look(actor, rollout) == {} and world.presence.paused_s == 4.0


def test_clocks_stand_while_anybody_works_and_run_when_all_wait() -> None:
    world = World()
    beats = [{"group": name} for name in ("actor", "rollout-2")]
    assert world.look(*beats, {"group": "actor", "busy_s": 5.0}) == {} and world.presence.paused
    assert world.look(*beats) == {} and not world.presence.paused


def test_what_is_over_or_silent_is_not_there() -> None:
    world = World()
    both = [{"group": "actor"}, {"group": "rollout"}]
    world.over.add(("actor", 1))
    assert world.look(*both) == {"actor": "is not there"}
    world.over.clear()
    assert world.look(*both[1:], both[0] | {"at": world.now - 29.0}) == {"actor": "is not there"}


def test_a_wait_outlasts_its_time_while_a_group_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue's own clock, and that of a client, stand together; then the error is the
    queue's."""
    monkeypatch.setattr(presence, "UPDATE_S", 0.05)
    run, config = make_run(tmp_path / "run"), small()
    config.queue.wait_timeout_s, config.liveness.beat_s = 0.3, 0.05
    with in_thread(run, config) as controller, QueueClient(run, config, "actor", 1) as actor:
        asked = actor.submit_claim("actor", BUDGET)
        deadline = time.monotonic() + 20.0
        while actor.beat.paused_s < 3 * config.queue.wait_timeout_s and time.monotonic() < deadline:
            assert not asked.done()
            # A look at the clock that stands; the deadline above ends it.
            time.sleep(0.01)
        assert controller.service.presence.awaited_groups.keys() >= {"rollout"}
        others = [
            QueueClient(run, config, name, 1)
            for name in config.groups
            if name not in ("hub", "actor")
        ]
        with pytest.raises(
            DeadlineError, match=r"claim actor: nothing came for .*waits for rows of rollout"
        ):
            asked.result(20.0)
        assert not controller.service.presence.awaited_groups
        for client in others:
            client.close()


def test_nobody_is_waited_for_longer_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "UPDATE_S", 0.05)
    run, config = make_run(tmp_path / "run"), small()
    config.queue.wait_timeout_s, config.liveness.longest_wait_s = 0.2, 0.5
    with in_thread(run, config), QueueClient(run, config, "actor", 1) as actor:
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="nothing came"):
            actor.claim("actor", BUDGET)
        assert time.monotonic() - began >= 0.6


def test_how_long_one_part_is_loaded_is_told_but_for_waits_for_a_disk(tmp_path: Path) -> None:
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config), QueueClient(run, config, "actor", 1) as actor:
        actor.connection.call("status")
        actor.beat.loads = lambda: True
        actor.beat.set_phase("loading the model")
        actor.beat._phase_since, actor.beat._waited_at = actor.beat._phase_since - 100.0, -math.inf
        assert actor.beat.content()["loading_s"] >= 100.0
        WAITS.begin(run.root, OSError(28, "No space left on device"))
        try:
            assert actor.beat.content()["loading_s"] == 0.0
        finally:
            WAITS.end(run.root)
        actor.beat.set_phase("")
        assert "loading_s" not in actor.beat.content(), "it may wait for the hub"


def test_who_waits_for_its_turn_on_devices_is_not_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it waited for: it is the actor that loads, and the wait is no part of an engine's
    start."""
    monkeypatch.setattr(presence, "UPDATE_S", 0.0)
    run, config = make_run(tmp_path / "run"), small()
    config.liveness.beat_s = 0.05
    with in_thread(run, config) as controller, QueueClient(run, config, "rollout", 1) as client:
        client.connection.call("status")
        client.beat.loads, client.beat.busy = lambda: True, lambda: 3600.0
        client.beat.set_phase("waiting for the actor to make room", waits=True)
        client.beat._waited_at = -math.inf
        about = client.beat.content()
        assert about["doing"] == "waiting for the actor to make room" and not about["loads"]
        assert about["busy_s"] < 60.0 and "loading_s" not in about
        until(
            lambda: "rollout" not in controller.service.presence.awaited_groups,
            20.0,
            "the rollout is there",
        )
        client.beat.set_phase("starting")
        client.beat._phase_since -= 100.0
        assert client.beat.content()["loads"] and client.beat.content()["loading_s"] < 60.0, (
            "it has waited until now"
        )
        until(
            lambda: (
                controller.service.presence.awaited_groups.get("rollout", [""])[0] == "is loading"
            ),
            20.0,
            "the rollout loads",
        )


def test_an_engine_that_has_to_wait_for_the_devices_says_so() -> None:
    """Of several, what is done is told before what is waited for."""
    told: list[tuple[str, bool]] = []
    rollout = Rollout.__new__(Rollout)
    rollout.phases = {}

    def submit(op: str, timeout: float | None = None, **args: object) -> Future:
        told.append((op, False))
        answer: Future = Future()
        answer.set_result({})
        return answer

    beat = SimpleNamespace(set_phase=lambda doing, waits: told.append((doing, waits)))
    rollout.client = SimpleNamespace(beat=beat, training=TrainingRequests(submit))

    class Engine:
        phase = "loading weights"

        async def start(self) -> None:
            await asyncio.sleep(0)

    replica = Replica.__new__(Replica)
    replica.rollout, replica.number, replica.engine = rollout, 1, Engine()
    replica.config = SimpleNamespace(colocate=True)
    asyncio.run(replica.start_in_turn())
    assert told == [(FOR_TURN, True), ("take_turn", False), ("loading weights", False), ("", False)]
    rollout.set_phase("engine 0", FOR_TURN)
    rollout.set_phase("engine 1", "loading weights")
    assert told[-1] == ("loading weights", False)


def test_who_waits_for_a_hub_that_is_away_is_at_no_work(tmp_path: Path) -> None:
    """It may be away for longer than anything may take, and is told of that before it has
    answered."""
    run, config = make_run(tmp_path / "run"), small()
    with QueueClient(run, config, "reference", 1) as client:
        client.beat.busy = lambda: 3600.0
        assert client.beat.content()["busy_s"] < 60.0
        with in_thread(run, config):
            client.connection.call("status")
            assert client.beat.content()["busy_s"] < 60.0, "nor has it been since before"
            client.beat._waited_at = -math.inf
            assert client.beat.content()["busy_s"] == 3600.0
