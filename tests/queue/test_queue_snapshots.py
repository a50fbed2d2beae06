"""Snapshots: a replay from any of them gives what a replay of the whole journal gives, whatever
became of the files."""

from __future__ import annotations

import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.queue.controller import snapshots
from relax_hpc.queue.controller.eventlog import EventLog, Extent
from relax_hpc.queue.controller.journal import Journal, Position
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.controller.snapshots import Snapshots
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.plan import Plan
from tests.helpers.checked_queue import GROUPS
from tests.helpers.queue_helpers import HubProcess, Roles, in_thread, make_run, small
from tests.helpers.queue_in_memory import contents
from tests.helpers.queue_world import World

EXTENT = Extent(0, 0)


def random_world(seed: int, acts: int) -> World:
    """A run with faults, at some point in its life."""
    chance = random.Random(seed)
    config = small(
        chance.choice([1, 2, 4]),
        2,
        6,
        seed % 4,
        eval_every=chance.choice([0, 3]),
        keep_steps=seed % 3,
    )
    plan = replace(Plan.from_config(config), max_rows=chance.choice([7, 1000]))
    it = World(plan, chance.choice([1, 20, 1000]), 1, chance.choice([1, 2]), seed % 2 == 0)
    for _ in range(acts):
        role = chance.choice(sorted(GROUPS))
        if chance.random() < 0.04:
            it.kill(role, chance.random() < 0.5)
            it.older = chance.choice([0, 0, 1, 2])
        it.act(role, chance.randrange(20))
    return it


def over_the_wire(image: dict) -> dict:
    return msgpack.unpackb(msgpack.packb(image), strict_map_key=False)


@pytest.mark.parametrize("seed", range(8))
def test_a_replay_from_any_snapshot_is_the_full_replay(seed):
    it = random_world(seed, 250)
    records = [msgpack.unpackb(record, strict_map_key=False) for record in it.service.journal]
    full, told = QueueState(it.plan), []
    snapshots_at = set(random.Random(seed).sample(range(len(records)), min(12, len(records))))
    taken: list[tuple[int, int, dict]] = []
    for number, record in enumerate(records):
        if number in snapshots_at:
            taken.append((number, len(told), over_the_wire(full.dump())))
        full.apply(record)
        told += full.events.take()
    for number, known, image in taken:
        state, later = QueueState.load(it.plan, image), []
        for record in records[number:]:
            state.apply(record)
            later += state.events.take()
        assert contents(state) == contents(full) and later == told[known:], number


def test_the_dump_of_a_state_gives_that_state():
    it = random_world(5, 200)
    assert contents(QueueState.load(it.plan, over_the_wire(it.service.state.dump()))) == contents(
        it.service.state
    )


def made(folder: Path) -> tuple[Snapshots, Path, World]:
    it = random_world(3, 150)
    shots = Snapshots(folder, it.plan, durable=True)
    return shots, shots.write(it.service.state, Position(1, 500), EXTENT), it


def test_a_snapshot_that_is_not_whole_is_not_read(tmp_path):
    shots, path, it = made(tmp_path)
    assert contents(shots.load(path).state) == contents(it.service.state)
    whole = path.read_bytes()
    chance = random.Random(0)
    damaged = [whole[:cut] for cut in (0, 5, 23, 24, len(whole) // 2, len(whole) - 1)] + [
        whole + b"x"
    ]
    for at in [*range(24), *chance.sample(range(24, len(whole)), 40)]:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << chance.randrange(8)
        damaged.append(bytes(flipped))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(
            snapshots.SnapshotError, match=r"inc-000001-000000000000500\.snapshot: not used"
        ):
            shots.load(path)


def test_a_snapshot_of_another_configuration_is_not_read(tmp_path):
    shots, path, it = made(tmp_path)
    shots.plan = replace(it.plan, groups=frozenset(sorted(it.plan.groups)))
    shots.load(path)
    for change in ({"keep_steps": 9}, {"groups": frozenset(["hub"])}):
        shots.plan = replace(it.plan, **change)
        with pytest.raises(snapshots.SnapshotError, match="configured differently"):
            shots.load(path)


def test_the_newest_two_are_kept(tmp_path):
    shots, _, it = made(tmp_path)
    for offset in (700, 600, 800):
        shots.write(it.service.state, Position(1, offset), EXTENT)
    shots.write(it.service.state, Position(2, 50), EXTENT)
    assert [path.name for path in shots.paths()] == [
        "inc-000002-000000000000050.snapshot",
        "inc-000001-000000000000800.snapshot",
    ]
    (tmp_path / ".half-written").touch()
    assert (
        len(list(Snapshots(tmp_path, it.plan, durable=True).paths()))
        == len(list(tmp_path.iterdir()))
        == 2
    )


# -- a controller's life ---------------------------------------------------------------------------


def controller(run, config, every: int = 10**9) -> Controller:
    return Controller(
        run, Plan.from_config(config), claim_incarnation(run, "hub"), snapshot_every=every
    )


def full_replay(run, config) -> tuple[QueueState, int]:
    """What the journal alone says, and how many records it has."""
    state, journal = QueueState(Plan.from_config(config)), Journal(run.journal, 900)
    records = list(journal.replay())
    for record in records:
        state.apply(record)
    journal.close()
    journal.path.unlink()
    return state, len(records)


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """A run directory after two lives of its controller, with a snapshot at the end of each; and
    its full replay."""
    run, config = make_run(tmp_path_factory.mktemp("lived") / "run"), small()
    with Roles(run, config) as roles:
        for step in range(2):
            with in_thread(run, config) as hub:
                if step == 0:
                    roles.start()
                roles.step(step)
            hub.snapshots.write(hub.state, hub.journal.position, hub.event_log.extent)
    state, count = full_replay(run, config)
    return run, config, contents(state), count


@pytest.fixture
def again(lived, tmp_path, monkeypatch):
    """A copy of that run, and what a new controller makes of it: state, number of records replayed,
    events."""
    run, config = RunDir(tmp_path / "run"), lived[1]
    shutil.copytree(lived[0].root, run.root)
    replayed = []
    apply = QueueState.apply
    monkeypatch.setattr(
        QueueState, "apply", lambda self, record: replayed.append(record) or apply(self, record)
    )

    def start() -> tuple[dict, int, bytes]:
        hub = controller(run, config)
        hub.close()
        return contents(hub.state), len(replayed), run.events.read_bytes()

    return run, start


def files(run) -> list[Path]:
    return sorted(run.journal.with_name("snapshots").iterdir())


def test_a_snapshot_spares_the_replay(lived, again):
    run, start = again
    assert start() == (lived[2], 0, lived[0].events.read_bytes()) and len(files(run)) == 2


@pytest.mark.parametrize("damaged", [1, 2])
def test_without_it_the_previous_one_or_the_journal_do(lived, again, damaged, capsys):
    run, start = again
    for path in files(run)[-damaged:]:
        path.write_bytes(path.read_bytes()[:-1])
    found, replayed, events = start()
    assert found == lived[2] and events == lived[0].events.read_bytes()
    assert replayed == lived[3] if damaged == 2 else 0 < replayed < lived[3]
    assert capsys.readouterr().out.count("snapshot: not used, ValueError:") == damaged


@pytest.mark.parametrize("damage", [lambda e: e[:99], lambda e: b"", lambda e: b"x" + e[1:], None])
def test_events_that_no_snapshot_knows_are_written_from_the_journal(lived, again, damage):
    run, start = again
    if damage is None:
        run.events.unlink()
    else:
        run.events.write_bytes(damage(run.events.read_bytes()))
    assert start() == (lived[2], lived[3], lived[0].events.read_bytes())


def test_a_torn_tail_behind_a_snapshot_is_cut_off(lived, again, capsys):
    run, start = again
    with max(run.journal.iterdir()).open("ab") as file:
        file.write(b"\x99" * 7)
    found, replayed, events = start()
    assert replayed == 1, "the note of it"
    assert found["counts"].noted == {"torn_tail/journal": 1}
    assert {**found, "counts": None} == {**lived[2], "counts": None}
    assert (
        events.startswith(lived[0].events.read_bytes())
        and b'"torn_tail"' in events.splitlines()[-1]
    )
    assert (
        "inc-000002.journal: cut off the last 7 bytes, which are no whole record"
        in capsys.readouterr().out
    )
    assert start()[0] == found, "told once"


def test_what_a_fenced_controller_saved_after_the_seal_is_not_used(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    old = controller(run, config)
    new = controller(run, config)
    old.service.record(op="register", group="late", incarnation=7)
    old.journal.commit()
    old.event_log.write(old.state.events.take_lines())
    old.snapshots.write(old.state, old.journal.position, old.event_log.extent)
    third = controller(run, config)
    assert "late" not in third.state.members.incarnations
    for one in (old, new, third):
        one.close()


def test_controllers_killed_while_they_take_snapshots_lose_nothing(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with Roles(run, config) as roles:
        for step in range(4):
            with HubProcess(run, snapshot_every=1) as hub:
                if step == 0:
                    roles.start()
                roles.step(step)
                hub.kill()
        hub = controller(run, config)
        assert hub.state.progress.trained_steps == 4
        hub.close()
    full, _ = full_replay(run, config)
    assert contents(full) == contents(hub.state)
    assert run.events.read_bytes() == full.events.take_lines()


def test_a_controller_takes_snapshots_while_it_works(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config, snapshot_every=1) as hub, Roles(run, config) as roles:
        roles.start()
        roles.step(0)
        until = time.monotonic() + 10
        while not hub.snapshots.taken and time.monotonic() < until:
            roles["actor"].connection.call("status")
    assert hub.snapshots.taken
    newest = hub.snapshots.load(next(hub.snapshots.paths()))
    assert (
        newest.position.incarnation == 1
        and 0 < newest.position.offset <= hub.journal.position.offset
    )


def test_a_child_that_fails_is_reported_and_does_no_harm(tmp_path, monkeypatch, capfd):
    run, config = make_run(tmp_path / "run"), small()
    monkeypatch.setattr(QueueState, "dump", lambda _: 1 / 0)
    with in_thread(run, config, snapshot_every=1) as hub, Roles(run, config) as roles:
        roles.start()
        roles.step(0)
        until = time.monotonic() + 10
        said = ""
        while "no snapshot of the queue" not in said and time.monotonic() < until:
            roles["actor"].connection.call("status")
            said += capfd.readouterr().out
        assert "no snapshot of the queue" in said and hub.snapshots.taken == 0


def test_a_machine_without_processes_to_spare_goes_on(tmp_path, monkeypatch, capfd):
    def no_fork() -> int:
        raise BlockingIOError("no processes left")

    it = random_world(1, 20)
    monkeypatch.setattr(os, "fork", no_fork)
    shots = Snapshots(tmp_path, it.plan, durable=False, every=5)
    assert shots.due(5) and not shots.due(4)
    shots.take(it.service.state, 5, Position(1, 9), EXTENT, 0)
    assert "no processes left" in capfd.readouterr().out
    assert not shots.due(9) and shots.due(10)
    shots.close()


def test_the_beginning_of_an_older_event_file_is_taken_over(tmp_path):
    path = tmp_path / "events.jsonl"
    first = EventLog(path, 1)
    first.write(b"one\n")
    extent = first.extent
    first.write(b"two\n")
    first.publish()
    second = EventLog(path, 2)
    assert not second.begin_with(Extent(4, extent.crc ^ 1)) and second.extent == EXTENT
    assert second.begin_with(extent) and second.extent == extent
    second.write(b"three\n")
    second.publish()
    first.write(b"late\n")
    first.flush()
    assert path.read_bytes() == b"one\nthree\n"
    for log in (first, second):
        log.close()
