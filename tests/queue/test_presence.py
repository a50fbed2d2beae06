"""Deadlines pause while a group is missing, loads or works. They run when all groups wait."""

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
    """Beats of the groups, and a clock that the test sets."""

    def __init__(self) -> None:
        self.now, self.ended = 1000.0, set[tuple[str, int]]()
        self.presence = GroupPresence(GROUPS, 30.0, self.now)

    def update(self, *beats: dict[str, Any], seconds: float = 2.0) -> dict[str, str]:
        """Report ``beats`` after some seconds. Returns the awaited groups with their reasons."""
        self.now += seconds
        beats_by_file = {
            f"{number}": {"incarnation": 1, "at": self.now} | beat
            for number, beat in enumerate(beats)
        }
        self.presence.update(beats_by_file, lambda owner: int(owner in self.ended), self.now)
        return {name: reason for name, (reason, _) in self.presence.awaited_groups.items()}


def test_a_group_is_awaited_until_it_beats_and_has_loaded() -> None:
    world = World()
    actor, rollout = {"group": "actor"}, {"group": "rollout"}
    assert world.update(actor) == {"rollout": "is not there"} and world.presence.paused_s == 2.0
    assert world.update(actor, rollout | {"loads": True}) == {"rollout": "is loading"}
    assert world.presence.report(world.now)["rollout"]["since_s"] == 2.0, (
        "the time counts from the first update without the group"
    )
    assert world.update(actor, rollout) == {} and world.presence.paused_s == 4.0


def test_deadlines_pause_while_a_group_works_and_run_when_all_wait() -> None:
    world = World()
    beats = [{"group": name} for name in ("actor", "rollout-2")]
    assert world.update(*beats, {"group": "actor", "busy_s": 5.0}) == {} and world.presence.paused
    assert world.update(*beats) == {} and not world.presence.paused


def test_an_ended_or_silent_incarnation_counts_as_missing() -> None:
    world = World()
    both = [{"group": "actor"}, {"group": "rollout"}]
    world.ended.add(("actor", 1))
    assert world.update(*both) == {"actor": "is not there"}
    world.ended.clear()
    assert world.update(*both[1:], both[0] | {"at": world.now - 29.0}) == {"actor": "is not there"}


def test_a_request_waits_beyond_its_timeout_while_a_group_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadlines of the queue and of the client pause together. The queue then reports the
    timeout."""
    monkeypatch.setattr(presence, "UPDATE_S", 0.05)
    run, config = make_run(tmp_path / "run"), small()
    config.queue.wait_timeout_s, config.liveness.beat_s = 0.3, 0.05
    with in_thread(run, config) as controller, QueueClient(run, config, "actor", 1) as actor:
        claim = actor.submit_claim("actor", BUDGET)
        deadline = time.monotonic() + 20.0
        while actor.beat.paused_s < 3 * config.queue.wait_timeout_s and time.monotonic() < deadline:
            assert not claim.done()
            # Polls the paused clock. The deadline above ends the loop.
            time.sleep(0.01)
        assert controller.service.presence.awaited_groups.keys() >= {"rollout"}
        other_clients = [
            QueueClient(run, config, name, 1)
            for name in config.groups
            if name not in ("hub", "actor")
        ]
        with pytest.raises(
            DeadlineError, match=r"claim actor: nothing came for .*waits for rows of rollout"
        ):
            claim.result(20.0)
        assert not controller.service.presence.awaited_groups
        for client in other_clients:
            client.close()


def test_a_missing_group_is_awaited_only_for_the_longest_wait(
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


def test_loading_seconds_of_a_phase_do_not_include_waits_for_a_disk(tmp_path: Path) -> None:
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
        assert "loading_s" not in actor.beat.content(), (
            "a process without a phase may wait for the hub"
        )


def test_a_process_that_waits_for_its_devices_is_not_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other groups do not wait for it, because the actor loads. The wait does not count as time of
    the engine's start."""
    monkeypatch.setattr(presence, "UPDATE_S", 0.0)
    run, config = make_run(tmp_path / "run"), small()
    config.liveness.beat_s = 0.05
    with in_thread(run, config) as controller, QueueClient(run, config, "rollout", 1) as client:
        client.connection.call("status")
        client.beat.loads, client.beat.busy = lambda: True, lambda: 3600.0
        client.beat.set_phase("waiting for the actor to make room", waits=True)
        client.beat._waited_at = -math.inf
        content = client.beat.content()
        assert content["doing"] == "waiting for the actor to make room" and not content["loads"]
        assert content["busy_s"] < 60.0 and "loading_s" not in content
        until(
            lambda: "rollout" not in controller.service.presence.awaited_groups,
            20.0,
            "the rollout is there",
        )
        client.beat.set_phase("starting")
        client.beat._phase_since -= 100.0
        assert client.beat.content()["loads"] and client.beat.content()["loading_s"] < 60.0, (
            "the time of the wait must not count"
        )
        until(
            lambda: (
                controller.service.presence.awaited_groups.get("rollout", [""])[0] == "is loading"
            ),
            20.0,
            "the rollout loads",
        )


def test_an_engine_that_waits_for_its_devices_reports_this_phase() -> None:
    """If several engines have phases, work is reported instead of a wait."""
    reports: list[tuple[str, bool]] = []
    rollout = Rollout.__new__(Rollout)
    rollout.phases = {}
    stages: list[str] = []
    spans = SimpleNamespace(enter_stage=lambda stage, lane: stages.append(stage))
    rollout.context = SimpleNamespace(spans=spans)

    def submit(op: str, timeout: float | None = None, **args: object) -> Future:
        reports.append((op, False))
        answer: Future = Future()
        answer.set_result({})
        return answer

    beat = SimpleNamespace(set_phase=lambda doing, waits: reports.append((doing, waits)))
    rollout.client = SimpleNamespace(beat=beat, training=TrainingRequests(submit))

    class Engine:
        phase = "loading weights"

        async def start(self) -> None:
            await asyncio.sleep(0)

    replica = Replica.__new__(Replica)
    replica.rollout, replica.number, replica.engine = rollout, 1, Engine()
    replica.config = SimpleNamespace(colocate=True, only="")
    asyncio.run(replica.start_in_turn())
    assert reports == [
        (FOR_TURN, True),
        ("take_turn", False),
        ("loading weights", False),
        ("", False),
    ]
    assert stages == ["", "loading weights", ""], "a wait is no stage of a start"
    rollout.set_phase("engine 0", FOR_TURN)
    rollout.set_phase("engine 1", "loading weights")
    assert reports[-1] == ("loading weights", False)


def test_a_process_that_waits_for_a_missing_hub_does_not_count_as_busy(tmp_path: Path) -> None:
    """The hub may be missing for longer than any task may take. The first beat after its return
    must not report this time as work."""
    run, config = make_run(tmp_path / "run"), small()
    with QueueClient(run, config, "reference", 1) as client:
        client.beat.busy = lambda: 3600.0
        assert client.beat.content()["busy_s"] < 60.0
        with in_thread(run, config):
            client.connection.call("status")
            assert client.beat.content()["busy_s"] < 60.0, "time without a hub must not count"
            client.beat._waited_at = -math.inf
            assert client.beat.content()["busy_s"] == 3600.0
