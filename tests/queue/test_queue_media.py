"""Media through the queue's processes: stored once, counted on both ends, removed when no row needs
them any more."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.base.errors import RefusedError
from relax_hpc.base.versions import Version
from relax_hpc.queue.client import QueueClient, media_client
from relax_hpc.queue.client.claims import check_claim, claim_valid
from relax_hpc.queue.client.media_client import TOO_LARGE, store_media
from relax_hpc.queue.client.segments import START, append_segments, read_log
from relax_hpc.queue.controller.handlers.media import MAX_MEDIA
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage import media
from relax_hpc.queue.storage.media import MediaMismatch, MediaStore, check_media, hash_content
from tests.helpers.queue_helpers import (
    BUDGET,
    GIVES,
    HubProcess,
    Roles,
    in_thread,
    learned,
    make_run,
    rows_of,
    small,
)
from tests.helpers.queue_in_memory import InMemory, contents, refused_kind

PADS = {"image": 901, "audio": 903}
V0 = Version(1, 0)


def png(shade: int) -> bytes:
    """A grey picture of 8 x 8 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    pixels = zlib.compress(b"".join(b"\0" + bytes([shade] * 8) for _ in range(8)))
    head = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def wav(tone: int) -> bytes:
    """A hundredth of a second of 16-bit sound."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((np.sin(np.arange(160) * tone / 100) * 3000).astype("<i2").tobytes())
    return buffer.getvalue()


def with_media(client: QueueClient, tickets: list[int], version: Version = V0) -> list[Row]:
    """Rows of prompt groups as a rollout generates them. Each group has another picture and the
    same sound."""
    rows = []
    for ticket in tickets:
        image, audio = store_media(client, ticket, [png(ticket), wav(7)])
        for row in rows_of([ticket], version, length=12):
            row["prompt_len"], row["token_versions"][2:9], row["loss_mask"][2:9] = 9, 0, 0
            row["token_ids"][1:5], row["token_ids"][6:8] = PADS["image"], PADS["audio"]
            row["spans"] = [
                {"kind": "image", "start": 1, "length": 4, "media_id": image},
                {"kind": "audio", "start": 6, "length": 2, "media_id": audio},
            ]
            row["media_tokens"] = {image: 4, audio: 2}
            rows.append(row)
    return rows


def files(run) -> set[str]:
    return {path.name for path in run.media.iterdir()}


def step(roles: Roles, number: int) -> None:
    """Generate, score and train one step with media."""
    tickets = roles.admit(Version(1, number))
    assert (
        roles["rollout"].put_generated(with_media(roles["rollout"], tickets, Version(1, number)))
        == {}
    )
    roles["rollout"].settle()
    roles.learn(Version(1, number))
    rows = roles.train(number)
    for row in rows:
        assert check_media(row, PADS) == 6


def test_media_are_read_by_the_trainer_and_removed_when_their_steps_are_checkpointed(tmp_path):
    """The hub is killed between the steps. A medium that later prompts share stays."""
    run, config = make_run(tmp_path / "run"), small(keep_steps=0)
    shared = hash_content(wav(7))
    with in_thread(run, config), Roles(run, config) as roles:
        roles.start()
        step(roles, 0)
        first = {hash_content(png(0)), hash_content(png(1))}
        assert files(run) == first | {shared}
    with (
        in_thread(run, config, snapshot_every=1) as hub,
        Roles(run, config, incarnation=1) as roles,
    ):
        assert hub.state.media.counts == {
            shared: 2,
            hash_content(png(0)): 1,
            hash_content(png(1)): 1,
        }
        assert files(run) == first | {shared}, "rows are trained, but not in a checkpoint yet"
        store = MediaStore(run.media)
        assert bytes(store.read(hash_content(png(1)))) == png(1)
        with wave.open(io.BytesIO(store.read(shared))) as sound:
            assert sound.getnframes() == 160
        step(roles, 1)
        roles["actor"].connection.call("checkpoint", step=1, name="c1", digest="d")
        roles["actor"].connection.call("status")
        second = {hash_content(png(2)), hash_content(png(3))}
        assert files(run) == second | {shared}
        roles["actor"].connection.call("checkpoint", step=2, name="c2", digest="d")
        roles["actor"].connection.call("status")
        assert files(run) == set() and hub.state.media.holders == {}


def test_media_counts_survive_a_kill_of_the_hub(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with HubProcess(run) as first, Roles(run, config) as roles:
        tickets = roles.admit(roles.start())
        rows = with_media(roles["rollout"], tickets)
        (run.media / ("0" * 64)).write_bytes(b"of a rollout that was killed, and never named")
        first.kill()
        with HubProcess(run):
            assert roles["rollout"].put_generated(rows) == {}
            roles["rollout"].settle()
            assert files(run) == {hash_content(png(0)), hash_content(png(1)), hash_content(wav(7))}
            roles.learn(V0)
            claim = claim_valid(roles["actor"], "actor", BUDGET, placeholders=PADS)
            assert claim.tickets == (0, 1) == claim.with_media
            assert all(row["media_tokens"] for row in roles["actor"].rows(claim))


def damage_last_row(rows: list[Row], damage: str, store: Path) -> None:
    """Damage the spans, counts or media of the last row."""
    spans = rows[-1]["spans"]
    if damage == "fewer":
        rows[-1]["spans"] = [{**spans[0], "length": 3}, spans[1]]
    elif damage == "counted otherwise":
        rows[-1]["media_tokens"] = {**rows[-1]["media_tokens"], spans[0]["media_id"]: 5}
    elif damage == "not counted":
        rows[-1]["media_tokens"] = {}
    elif damage == "spans lost":
        rows[-1]["spans"] = []
    elif damage == "another medium":
        rows[-1]["spans"] = [{**spans[0], "media_id": spans[1]["media_id"]}, spans[1]]
    else:
        (store / spans[0]["media_id"]).unlink()


def test_each_medium_is_hashed_once_and_verified_once_in_each_process(tmp_path, monkeypatch):
    """Further samples, claims of the same prompt and reads need no further hash or check."""
    hashed: dict[str, list[bytes]] = {"hash_content": [], "xxh3_128_digest": []}
    for module, name in (
        (media, "hash_content"),
        (media_client, "hash_content"),
        (media.xxhash, "xxh3_128_digest"),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda blob, real=real, n=name, **k: hashed[n].append(bytes(blob)) or real(blob, **k),
        )
    run, config = make_run(tmp_path / "run"), small(keep_steps=0)
    with in_thread(run, config), Roles(run, config) as roles:
        tickets = roles.admit(roles.start())
        rows = with_media(roles["rollout"], tickets)
        assert len(rows) > len(tickets) and roles["rollout"].put_generated(rows) == {}
        roles["rollout"].settle()
        blobs = sorted([png(0), png(1), wav(7)])
        assert sorted(hashed["hash_content"]) == sorted([*blobs, wav(7)]), (
            "the sound is stored for two prompt groups"
        )
        hashed["xxh3_128_digest"].clear()
        reader = roles["reference"]
        for _ in range(2):
            claim = reader.claim("reference", BUDGET)
            assert check_claim(reader, claim, PADS)
            assert {bytes(reader.media.read(hash_content(blob))) for blob in blobs} == set(blobs)
            assert sorted(hashed["xxh3_128_digest"]) == blobs
            reader.return_claim(claim)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        *(
            (damage, "media_mismatch")
            for damage in ("fewer", "counted otherwise", "not counted", "spans lost")
        ),
        ("another medium", "media_mismatch"),
        ("removed", "media_missing"),
    ],
)
def test_a_mismatch_is_quarantined_and_the_run_continues(tmp_path, damage, reason):
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config) as hub, Roles(run, config) as roles:
        tickets = roles.admit(roles.start())
        rows = with_media(roles["rollout"], tickets)
        damage_last_row(rows, damage, run.media)
        assert roles["rollout"].put_generated(rows) == {}
        roles["rollout"].settle()
        claim = roles["reference"].claim("reference", BUDGET)
        assert claim.tickets == (0, 1) and not check_claim(roles["reference"], claim, PADS)
        assert hub.state.counts.dropped == {reason: 2} and not hub.state.leases
        assert hash_content(png(1)) in hub.state.media.counts, (
            "media stay while the ticket is generated again"
        )
        admitted = roles["rollout"].connection.call("admit", reader="rollout/0", count=1)
        assert (admitted["tickets"], admitted["attempts"]) == ([1], [1]), "with another prompt"
        assert roles["rollout"].put_generated(with_media(roles["rollout"], [1])) == {}
        roles["rollout"].settle()
        roles.learn(V0)
        remaining = roles["reference"].claim("reference", BUDGET)
        assert remaining.tickets == (1,), "the other group of the released window was claimed first"
        assert (
            roles["reference"].put(
                learned(roles["reference"].rows(remaining), V0), GIVES["reference"], remaining
            )
            == {}
        )
        roles["reference"].settle()
        assert len(roles.train(0)) == 4


def test_a_dropped_group_keeps_its_media_until_it_is_generated_again(tmp_path):
    run, config = make_run(tmp_path / "run"), small(keep_steps=0, staleness=1)
    with in_thread(run, config) as hub, Roles(run, config) as roles:
        roles.admit(roles.start(), 2)
        assert roles["rollout"].put_generated(with_media(roles["rollout"], [0, 1])) == {}
        roles["rollout"].settle()
        with QueueClient(run, config, "actor", 2) as actor:
            actor.connection.call("publish", version=str(Version(2, 0)), digest="d")
            actor.connection.call("resume", step=0)
            with QueueClient(run, config, "rollout", 2) as rollout:
                rollout.connection.call("status")
                names = {hash_content(png(0)), hash_content(png(1)), hash_content(wav(7))}
                assert files(run) == names == set(hub.state.media.counts)
                image_ids = store_media(rollout, 0, [png(0)])
                assert image_ids == [hash_content(png(0))] and files(run) == names


def test_a_ticket_gets_the_media_of_its_spare(tmp_path):
    run, config = make_run(tmp_path / "run"), small(staleness=2, keep_steps=0)
    with in_thread(run, config) as hub, Roles(run, config) as roles:
        rollout = roles["rollout"]
        roles.admit(roles.start(), 2)
        extra = with_media(rollout, [0])
        assert (
            append_segments(rollout, [row | {START: 0} for row in extra], {0: 1}, spare=True) == {}
        )
        assert hub.state.media.counts[hash_content(png(0))] == 2
        assert contents(QueueState.load(hub.state.plan, hub.state.dump())) == contents(hub.state)
        admitted = rollout.tickets.admit("rollout/0", 1).result()
        (ticket,) = admitted.tickets
        assert hub.state.media.media_of(ticket) == tuple(
            sorted([hash_content(png(0)), hash_content(wav(7))])
        )
        assert set(hub.state.media.holders) == {0, ticket}, (
            "the spare itself must hold no media any more"
        )
        (log,) = admitted.logs
        rows_of_episode = read_log(rollout, log)
        rows = [*rows_of_episode[0], *rows_of_episode[1]]
        ours = [row | {"row_id": row_id(ticket, k), "ticket": ticket} for k, row in enumerate(rows)]
        assert rollout.put_generated([row | {"reward": 0.0} for row in ours]) == {}
        rollout.settle()
        assert hub.state.segments.counts() == {"appended": 6, "used": 6, "held": 0}
        claim = roles["reference"].claim("reference", BUDGET)
        assert claim.tickets == (2,) and check_claim(roles["reference"], claim, PADS)


def test_sizes_are_bounded_and_the_error_names_the_setting(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    config.queue.max_medium_bytes, config.queue.max_group_media_bytes = 1000, 1500
    with in_thread(run, config) as hub, Roles(run, config) as roles:
        roles.admit(roles.start())
        wrong = {
            "a medium of 1001 bytes, allowed queue.max_medium_bytes=1000; shrink it, or raise": [
                bytes(1001)
            ],
            "2 media of 1800 bytes, allowed queue.max_group_media_bytes=1500": [
                b"a" * 900,
                b"b" * 900,
            ],
            "a medium of 0 bytes, allowed 1 or more": [b""],
        }
        for text, media in wrong.items():
            with pytest.raises(MediaMismatch, match=f"ticket 0: {text}") as caught:
                store_media(roles["rollout"], 0, media)
            assert caught.value.reason in (TOO_LARGE, "bad_media")
        many = [bytes([n % 256, n // 256]) for n in range(MAX_MEDIA + 1)]
        with pytest.raises(
            RefusedError, match=f"ticket 0 has {MAX_MEDIA + 1} of them, allowed {MAX_MEDIA}"
        ):
            store_media(roles["rollout"], 0, many)
        assert hub.state.media.counts == {} and not run.media.exists()


def test_only_the_rollout_that_generates_a_group_can_register_its_media(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config) as hub, Roles(run, config) as roles:
        tickets = roles.admit(roles.start())
        assert store_media(roles["actor"], 0, [png(0)]) == [hash_content(png(0))]
        assert not run.media.exists() and hub.state.media.counts == {}
        rows = with_media(roles["rollout"], tickets)
        rows[0]["spans"][0]["media_id"] = rows[1]["spans"][0]["media_id"] = hash_content(png(9))
        assert roles["rollout"].put_generated(rows) == {0: "unknown_media"}
        assert hub.state.counts.dropped == {"unknown_media": 2} and list(
            hub.state.tickets.reissued
        ) == [0]
        rows[0]["spans"] = [{"kind": "image"}]
        with pytest.raises(RefusedError, match=r"put: 000000000\.00\.00: span"):
            roles["rollout"].put_generated(rows)


@pytest.mark.parametrize("ids", [["../token"], ["A" * 64], ["0" * 64, 7], "0"])
def test_hostile_ids_are_refused(ids):
    service = InMemory(Plan.from_config(small()))
    assert refused_kind(service, "rollout", 1, "k", "media", ticket=0, ids=ids) == "refused"
    assert service.state.media.counts == {}
