"""What dies, lies or comes too late: controllers killed for real, torn and corrupted journals,
fences, bad frames."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import wait

import pytest

from relax_hpc.base.errors import (
    ConfigError,
    DeadlineError,
    FencedError,
    RefusedError,
    RelaxError,
    StoppedError,
)
from relax_hpc.base.protocol import PROTOCOL
from relax_hpc.base.versions import Version
from relax_hpc.net.rendezvous.roster import GroupCard, claim_incarnation, publish_card
from relax_hpc.net.transport.wire import pack
from relax_hpc.queue.client import QueueClient, connection
from relax_hpc.queue.controller.journal import Journal, JournalError, Position
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.plan import Plan
from tests.helpers.queue_helpers import (
    BUDGET,
    GIVES,
    HubProcess,
    Roles,
    dial,
    in_thread,
    learned,
    make_run,
    next_payload,
    rows_of,
    small,
)


def test_a_killed_controller_comes_back_and_clients_go_on(tmp_path):
    """Killed with a step half done and requests waiting; the successor answers them and the run
    trains on."""
    run, config = make_run(tmp_path / "run"), small()
    with Roles(run, config) as roles:
        with HubProcess(run) as hub:
            roles.start()
            first = roles.generate(Version(1, 0))
            waiting = roles["actor"].submit_claim("actor", BUDGET)
            roles["actor"].connection.call("status")
            hub.kill()
            lost = roles["rollout"].connection.submit(
                "note", what="engine_fault", name="x", reason="y"
            )
        with HubProcess(run) as hub:
            assert hub.incarnation == 2
            roles.learn(Version(1, 0))
            assert waiting.result(timeout=60).tickets == tuple(first) == (0, 1)
            assert lost.result(timeout=60) == {}
            roles["actor"].connection.call("publish", version="i000001-v000001", digest="d")
            roles["actor"].connection.call("trained", step=0, leases=[waiting.result().lease])
            roles.step(1)
            assert roles["actor"].connection.call("status")["trained_steps"] == 2


def test_a_hub_of_another_protocol_is_refused_by_name(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    run.rendezvous("hub").mkdir(parents=True)
    publish_card(
        run, GroupCard("hub", claim_incarnation(run, "hub"), [], "tcp://127.0.0.1:9", PROTOCOL + 1)
    )
    with QueueClient(run, config, "actor", 1) as client:
        for _ in range(2):
            with pytest.raises(
                ConfigError,
                match=f"this code has protocol {PROTOCOL}, hub incarnation 1 has {PROTOCOL + 1}",
            ):
                client.connection.call("status")


def test_who_waits_for_a_hub_that_has_gone_for_good_is_told(tmp_path, monkeypatch):
    """A run that was asked to stop starts none again; one that was not does."""
    monkeypatch.setattr(connection, "_NO_HUB_S", 0.2)
    run, config = make_run(tmp_path / "run"), small()
    with Roles(run, config) as roles:
        with HubProcess(run) as hub:
            roles.start()
            waiting = roles["actor"].submit_claim("actor", BUDGET)
            run.stop.write_text("{}")
            roles["actor"].connection.call("status")
            hub.kill()
        with pytest.raises(StoppedError, match="hub has already ended"):
            waiting.result(timeout=30)
        run.stop.unlink()
        waits = roles["actor"].connection.submit("status")
        with HubProcess(run):
            waits.result(timeout=30)


def test_what_a_dead_owner_held_comes_back(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        roles.generate(version)
        held = roles["reference"].claim("reference", BUDGET)
        with QueueClient(run, config, "supervisor", 1) as supervisor:
            supervisor.connection.call("down", group="reference", incarnation=1)
        with pytest.raises(FencedError, match="reference incarnation 1 is over"):
            roles["reference"].return_claim(held)
        with QueueClient(run, config, "reference", 2) as successor:
            assert successor.claim("reference", BUDGET).tickets == held.tickets


def test_a_second_controller_fences_the_first(tmp_path):
    """The first stops at its next reply, and what it wrote after the seal is never read."""
    run, config = make_run(tmp_path / "run"), small()
    old = Controller(run, Plan.from_config(config), claim_incarnation(run, "hub"))
    new = Controller(run, Plan.from_config(config), claim_incarnation(run, "hub"))
    with pytest.raises(FencedError, match="hub incarnation 1 is over"):
        old.serve(lambda: False)
    old.service.record(op="register", group="late", incarnation=7)
    old.journal.commit()
    with old.journal.path.open("ab") as file:
        file.write(b"\xffgarbage that no checksum fits")
    third = Controller(run, Plan.from_config(config), claim_incarnation(run, "hub"))
    assert "late" not in third.state.members.incarnations
    for controller in (old, new, third):
        controller.close()


def journal(folder, incarnation: int) -> tuple[Journal, list[dict]]:
    made = Journal(folder, incarnation)
    return made, list(made.replay())


def test_a_torn_tail_is_cut_off(tmp_path):
    (first, _), ends = journal(tmp_path, 1), []
    for number in range(3):
        first.append({"op": "register", "group": "g", "incarnation": number})
        first.commit()
        ends.append(first.position.offset)
    first.close()
    whole = first.path.read_bytes()
    for cut in range(1, 12):
        first.path.write_bytes(whole[:-cut])
        second, records = journal(tmp_path, 1 + cut)
        assert [record["incarnation"] for record in records] == [0, 1]
        assert sum(second.torn_bytes.values()) == len(whole) - cut - ends[-2], "reported"
        second.close()
        second.path.unlink()


def test_a_journal_of_another_format_is_refused(tmp_path):
    first = Journal(tmp_path, 1)
    first.append({"op": "seal", "lengths": {}})
    first.close()
    with pytest.raises(
        JournalError, match=r"inc-000001.journal: format 1, this program reads 3; finish the run"
    ):
        journal(tmp_path, 2)


def test_a_replay_goes_on_from_any_position_that_the_journal_covers(tmp_path):
    positions = [Position(1, 0)]
    for incarnation in (1, 2, 3):
        made, _ = journal(tmp_path, incarnation)
        for number in range(3):
            made.append({"op": "register", "group": "g", "incarnation": 10 * incarnation + number})
            made.commit()
            positions.append(made.position)
        made.close()
    everything = [10 * incarnation + number for incarnation in (1, 2, 3) for number in range(3)]
    for number, position in enumerate(positions):
        last = Journal(tmp_path, 9)
        assert last.covers(position)
        assert [record["incarnation"] for record in last.replay(position)] == everything[number:]
        last.close()
        last.path.unlink()
    made = Journal(tmp_path, 9)
    beyond = [
        Position(3, positions[-1].offset + 1),
        Position(2, positions[6].offset + 1),
        Position(4, 0),
    ]
    assert not any(map(made.covers, beyond))
    made.close()


def test_zeros_that_a_power_loss_left_at_the_end_are_cut_off(tmp_path):
    first, _ = journal(tmp_path, 1)
    first.append({"op": "register", "group": "g", "incarnation": 1})
    first.close()
    with first.path.open("ab") as file:
        file.write(bytes(5000))
    assert [record["group"] for record in journal(tmp_path, 2)[1]] == ["g"]


def test_a_group_of_records_is_on_disk_before_any_is_answered(tmp_path, monkeypatch):
    """One sync for all of them, a sync of what predecessors wrote, and none where durability is not
    asked for."""
    calls = []
    monkeypatch.setattr(os, "fdatasync", lambda _: calls.append("records"))
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    for durable, sealing in (
        (True, ["fsync", "records"]),
        (False, []),
        (True, ["fsync", "fsync", "fsync", "records"]),
    ):
        made = Journal(tmp_path, 1 + len(list(tmp_path.iterdir())), durable)
        assert list(made.replay()) == [] and calls == sealing, (
            "the folder, the predecessors, the seal"
        )
        calls.clear()
        for _ in range(3):
            made.append({"op": "seal", "lengths": {}})
        made.commit()
        assert calls == ["records"] * durable
        made.commit()
        assert calls == ["records"] * durable, "nothing new, nothing to sync"
        made.close()
        calls.clear()


def test_events_that_a_crash_cost_are_written_again(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with Roles(run, config) as roles:
        with in_thread(run, config):
            roles.start()
            roles.step(0)
        whole = run.events.read_bytes()
        for damaged in (whole[:-30], b"", whole + whole[-100:]):
            run.events.write_bytes(damaged)
            with in_thread(run, config):
                assert run.events.read_bytes() == whole


def test_an_events_file_that_an_older_controller_put_back_is_noticed(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    hub = Controller(run, Plan.from_config(config), claim_incarnation(run, "hub"))
    (tmp_path / "older").write_bytes(b"")
    (tmp_path / "older").replace(run.events)
    with pytest.raises(RelaxError, match=r"events\.jsonl: replaced or removed"):
        hub.serve(lambda: False)
    hub.close()


def test_a_damaged_middle_is_refused_with_its_offset(tmp_path):
    first, _ = journal(tmp_path, 1)
    first.commit()
    at = first.path.stat().st_size
    for number in range(3):
        first.append({"op": "register", "group": "g", "incarnation": number})
    first.close()
    whole = first.path.read_bytes()
    for byte in range(at, at + 20):
        for bit in (0x01, 0x80):
            damaged = bytearray(whole)
            damaged[byte] ^= bit
            first.path.write_bytes(damaged)
            made = Journal(tmp_path, 2)
            with pytest.raises(JournalError, match=rf"inc-000001.journal: .* at offset {at}$"):
                list(made.replay())
            made.close()
            made.path.unlink()


def test_sealed_records_must_be_whole(tmp_path):
    for incarnation in (1, 2):
        made, _ = journal(tmp_path, incarnation)
        made.append({"op": "register", "group": "g", "incarnation": incarnation})
        made.close()
    path = tmp_path / "inc-000001.journal"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(JournalError, match="sealed at"):
        journal(tmp_path, 3)


def test_a_zombie_that_opens_late_is_not_replayed(tmp_path):
    newer, _ = journal(tmp_path, 3)
    zombie, _ = journal(tmp_path, 2)
    zombie.append({"op": "register", "group": "late", "incarnation": 1})
    zombie.close()
    assert zombie.find_successor() == 3 and not newer.find_successor()
    newer.close()
    _, records = journal(tmp_path, 4)
    assert records == []


def test_what_is_no_request_ends_its_connection_and_changes_nothing(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    good = {
        "id": 1,
        "client": "c",
        "group": "actor",
        "incarnation": 9,
        "op": "beat",
        "args": {},
        "patience": 1.0,
    }
    odd = [{"incarnation": float("inf")}, {"patience": "x"}, {"args": 3}, {"op": None}]
    payloads = [
        b"x" * 100,
        b"\x01",
        pack({}),
        pack(good)[:-1],
        *(pack(good | change) for change in odd),
    ]
    with in_thread(run, config) as controller, Roles(run, config) as roles:
        roles.start()
        for number, payload in enumerate(payloads, 1):
            connection = dial(run, controller.endpoint, controller.incarnation)
            connection.send(payload)
            with pytest.raises(ConnectionResetError):
                next_payload(connection)
            assert roles["actor"].connection.call("status")["refused_connections"] == number
        assert controller.state.members.incarnations["actor"] == 1


def test_requests_with_bad_arguments_are_refused_and_not_journaled(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    bad = [
        ("put", {"shard": {"name": "../../token"}, "rows": [], "fields": ["token_ids"]}),
        ("put", {"shard": "x", "rows": 7, "fields": None}),
        ("put", {"shard": {"name": "s"}, "rows": [], "fields": ["reward"]}),
        ("serve", {"reader": "r", "version": "newest"}),
        ("resume", {"step": -1}),
        ("resume", {"step": "x"}),
        ("evaluated", {"version": 1}),
        ("claim", {"task": "nobody", "budget": 1, "boundary": 1}),
        ("claim", {"task": "actor", "budget": 1, "boundary": 0}),
        ("nonsense", {}),
        ("beat", {"request": 1}),
    ]
    with in_thread(run, config) as controller, Roles(run, config) as roles:
        roles.start()
        for op, args in bad:
            with pytest.raises(RelaxError):
                roles["actor"].connection.call(op, timeout=1.0, **args)
        assert run.token_file.exists()
        roles.step(0)
        trained = controller.state.progress.trained_steps
    with in_thread(run, config) as successor:
        assert successor.state.progress.trained_steps == trained == 1


def test_waits_end_with_an_error_that_says_where_to_look(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with QueueClient(run, config, "actor", 1) as alone:
        with pytest.raises(
            DeadlineError, match=r"status: the hub has not answered .* open .*logs/hub/inc-000001"
        ):
            alone.connection.call("status", timeout=0.1)
    with in_thread(run, config), Roles(run, config) as roles:
        started = time.monotonic()
        said = (
            r"claim actor: nothing came for 0\.\d s \(waits for rows of rollout\); .*open the "
            r"logs .*logs"
        )
        with pytest.raises(DeadlineError, match=said):
            roles["actor"].connection.call("claim", timeout=0.2, task="actor", budget=1, boundary=2)
        assert 0.15 < time.monotonic() - started < 1.2


def test_a_closed_client_leaves_nobody_waiting(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    client = QueueClient(run, config, "actor", 1)
    waiting = [client.connection.submit("status") for _ in range(3)]
    threading.Thread(target=client.close).start()
    assert len(wait(waiting, timeout=60).done) == 3
    assert all(isinstance(future.exception(), RelaxError) for future in waiting)
    with pytest.raises(RelaxError, match="closed"):
        client.connection.submit("status").result(timeout=60)


def test_a_waiter_that_goes_away_does_not_break_the_connection(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config), QueueClient(run, config, "actor", 1) as client:
        assert not client.connection.submit(
            "claim", task="actor", budget=1, boundary=2, timeout=0.1
        ).cancel()
        assert not client.submit_claim("actor", 1).cancel()
        time.monotonic()
        assert client.connection.call("status")["trained_steps"] == 0


def test_a_resume_with_other_groups_takes_over_from_the_old_ones(tmp_path):
    """The rollout's group is renamed with tickets in generation, the reference is dropped while it
    holds a claim."""
    run, config = make_run(tmp_path / "run"), small(staleness=1)
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        roles["rollout"].put_generated(rows_of(roles.admit(version)[:2], version))
        assert roles["reference"].claim("reference", BUDGET).tickets == (0, 1)
        for role in ("actor_fwd", "advantages"):
            claim = roles[role].claim(role, BUDGET)
            roles[role].put(learned(roles[role].rows(claim), version), GIVES[role], claim)
    groups = config.groups
    del groups["reference"]
    groups["engines"] = groups.pop("rollout")
    with in_thread(run, config) as controller, Roles(run, config, 2) as roles:
        assert controller.state.weights.readers == {} and list(
            controller.state.tickets.reissued
        ) == [2, 3]
        assert not controller.state.leases
        with (
            QueueClient(run, config, "rollout", 1) as former,
            pytest.raises(FencedError, match="rollout incarnation 1"),
        ):
            former.connection.call("status")
        roles.start()
        assert roles.train(0)
    with in_thread(run, config) as controller:
        assert controller.state.progress.trained_steps == 1


def test_files_that_no_put_told_of_go_with_their_writers(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config), Roles(run, config) as roles:
        roles.generate(roles.start())
        with QueueClient(run, config, "supervisor", 1) as supervisor:
            supervisor.connection.call("down", group="reference", incarnation=1)
    (kept,) = run.shards.iterdir()
    over = ["reference-i000001-7-ab-000001.shard", ".reference-i000001-7-ab-000001.shard.7"]
    living = [
        "reference-i000002-8-ab-000001.shard",
        "rollout-i000001-9-ab-000009.shard",
        "unrelated",
    ]
    for name in over + living:
        (run.shards / name).touch()
    Controller(run, Plan.from_config(config), claim_incarnation(run, "hub")).close()
    assert {path.name for path in run.shards.iterdir()} == {kept.name, *living}


def test_rows_that_are_not_as_the_schema_says_are_refused_by_field(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        rows = rows_of(roles.admit(version), version)
        bad = {"reward": float("nan"), "token_ids": [1, 2], "prompt_len": 1 << 40}
        bad |= {"loss_mask": rows[0]["loss_mask"][1:]}
        bad |= {
            "rollout_logprobs": rows[0]["rollout_logprobs"].astype("float64"),
            "finish_reason": None,
        }
        for name, value in bad.items():
            with pytest.raises(RefusedError, match=f"put: {name}: "):
                roles["rollout"].put_generated([{**rows[0], name: value}, *rows[1:]])
        assert roles["rollout"].put_generated(rows) == {}
