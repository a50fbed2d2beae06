"""Media: stored once, whole or missing after a kill, removed with the last row, and compared with
the tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.versions import Version
from relax_hpc.queue.row_schema import BadRow
from relax_hpc.queue.storage import media
from relax_hpc.queue.storage.media import (
    MediaError,
    MediaMismatch,
    MediaStore,
    check_id,
    check_media,
    media_ids,
    read_placeholders,
)
from tests.helpers.queue_helpers import rows_of

PADS = {"image": 901, "video": 902, "audio": 903}
ID = "0" * 64
WRITER = """
import signal, sys
from pathlib import Path
from relax_hpc.queue.storage.media import MediaStore
folder, method = sys.argv[1:]
store = MediaStore(Path(folder), grace_s=100)
real = getattr(Path, method)
def stop(path, *args):
    if path.name.startswith(".now"):
        return real(path, *args)
    print("here", flush=True)
    signal.pause()
setattr(Path, method, stop)
store.put(b"half") if method == "replace" else store.remove_unused([])
"""


@pytest.fixture
def store(tmp_path: Path) -> MediaStore:
    return MediaStore(tmp_path / "media", durable=False, grace_s=100)


def end_grace(store: MediaStore) -> None:
    """Make all files older than the grace period."""
    for path in store.folder.iterdir():
        os.utime(path, (1, 1))


def kill_before(store: MediaStore, method: str) -> None:
    """Start a process that uses ``store``, and kill it before it calls ``Path.method``.

    `replace`: before its blob appears. `unlink`: in the middle of `remove_unused`.
    """
    command = [sys.executable, "-c", WRITER, str(store.folder), method]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout.readline() == b"here\n"
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL


def row_with(spans: Iterable[tuple[str, int, int]], length: int = 40) -> dict:
    """A row whose tokens fit its spans. The second half is sampled."""
    row = rows_of([1], Version(1, 0), samples=1, length=length)[0]
    row["token_versions"][: length // 2] = 0
    row["spans"] = [
        {"kind": k, "start": s, "length": n, "media_id": ID, "grid": [1, 2, 2]} for k, s, n in spans
    ]
    for kind, start, size in spans:
        row["token_ids"][start : start + size] = PADS[kind]
    return row


@given(blobs=st.lists(st.binary(min_size=1, max_size=200), max_size=6))
def test_media_are_read_as_they_were_put_and_stored_once(tmp_path_factory, blobs):
    store = MediaStore(tmp_path_factory.mktemp("media"), durable=False)
    ids = [store.put(blob) for blob in [*blobs, *blobs]]
    assert [bytes(store.read(media_id)) for media_id in ids] == [*blobs, *blobs]
    assert sorted(store.sizes().values()) == sorted(len(blob) for blob in set(blobs))
    assert {path.name for path in store.folder.iterdir()} == set(ids)


@pytest.mark.parametrize("durable", [False, True])
def test_arrays_are_stored_by_their_bytes(tmp_path, durable):
    store = MediaStore(tmp_path, durable)
    pixels = np.arange(24, dtype=np.uint8).reshape(4, 6)
    assert store.put(pixels) == store.put(pixels.tobytes()) == store.put(np.asfortranarray(pixels))
    stored = np.frombuffer(store.read(store.put(pixels)), np.uint8).reshape(4, 6)
    np.testing.assert_array_equal(stored, pixels)
    with pytest.raises(ValueError, match="read-only"):
        stored[0, 0] = 1


@pytest.mark.parametrize("size", [0, 11])
def test_sizes_have_a_limit(tmp_path, size):
    store = MediaStore(tmp_path, max_bytes=10)
    with pytest.raises(MediaError, match=f"media of {size} bytes, allowed 1 to 10"):
        store.put(bytes(size))
    assert store.sizes() == {}


@given(media_id=st.one_of(st.text(max_size=70), st.integers(), st.none()))
def test_hostile_ids_are_refused(media_id):
    with pytest.raises(MediaError, match="64 lower-case hex"):
        check_id(media_id)


@pytest.mark.parametrize(
    "media_id", ["../token", "/etc/passwd", f"../media/{ID}", f".{ID[1:]}", ID + "\n", "A" * 64]
)
def test_no_id_leads_out_of_the_store(store, media_id):
    for use in (store.read, lambda name: store.remove_unused([name])):
        with pytest.raises(MediaError, match="64 lower-case hex"):
            use(media_id)
    with pytest.raises(MediaMismatch, match="64 lower-case hex"):
        check_media(
            row_with([])
            | {"spans": [{"kind": "image", "start": 0, "length": 1, "media_id": media_id}]}
        )


def test_missing_and_damaged_media_are_named(store):
    with pytest.raises(MediaError, match=ID):
        store.read(ID)
    media_id = store.put(b"abc")
    (store.folder / media_id).write_bytes(b"abd")
    with pytest.raises(MediaError, match=f"{media_id}: damaged"):
        store.read(media_id)
    (store.folder / media_id).write_bytes(b"")
    with pytest.raises(MediaError, match=media_id):
        store.read(media_id)


@pytest.mark.parametrize("damaged", [b"", b"ab", b"abd", b"abcd"])
def test_damaged_media_are_written_again_by_the_next_put(store, damaged):
    media_id = store.put(b"abc")
    (store.folder / media_id).write_bytes(damaged)
    assert store.put(b"abc") == media_id
    assert bytes(store.read(media_id)) == b"abc"


@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(["put", "name", "unname", "end grace", "remove"]), st.integers(0, 4)
        )
    )
)
def test_only_media_without_a_row_and_without_grace_are_removed(tmp_path_factory, script):
    """`remove_unused` keeps media that rows name or that were put within the grace period, and no
    others."""
    store = MediaStore(tmp_path_factory.mktemp("media"), durable=False, grace_s=100)
    ids = [MediaStore(store.folder.parent / "other", False).put(bytes([n])) for n in range(5)]
    named: set[str] = set()
    fresh: set[str] = set()
    for action, number in script:
        media_id = ids[number]
        if action == "put":
            assert store.put(bytes([number])) == media_id
            fresh.add(media_id)
        elif action == "name" and media_id in fresh:
            named.add(media_id)
        elif action == "unname":
            named.discard(media_id)
        elif action == "end grace":
            end_grace(store)
            fresh = set()
        elif action == "remove":
            before = set(store.sizes())
            assert set(store.remove_unused(named)) == before - named - fresh
        assert named | fresh <= set(store.sizes())


def test_a_killed_writer_leaves_only_a_temporary_file(store):
    kill_before(store, "replace")
    assert len(list(store.folder.iterdir())) == 1, "its temporary file"
    assert store.sizes() == {}
    assert store.remove_unused([]) == [] and len(list(store.folder.iterdir())) == 1, (
        "another writer may still write it"
    )
    end_grace(store)
    assert store.remove_unused([]) == [] and not list(store.folder.iterdir())
    assert bytes(store.read(store.put(b"half"))) == b"half"


def test_a_controller_killed_during_remove_unused_loses_no_media(store):
    media_id = store.put(b"abc")
    end_grace(store)
    kill_before(store, "unlink")
    with pytest.raises(MediaError, match=media_id):
        store.read(media_id)
    assert store.remove_unused([media_id]) == []
    assert bytes(store.read(media_id)) == b"abc"


def test_media_put_while_they_are_removed_stay(store, monkeypatch):
    """Another process puts the same content between the check of its age and its removal."""
    media_id = store.put(b"abc")
    end_grace(store)
    files = store._files()
    monkeypatch.setattr(store, "_files", lambda: [*files, store.put(b"abc")][:1])
    assert store.remove_unused([]) == []
    assert bytes(store.read(media_id)) == b"abc"


@given(
    lengths=st.lists(
        st.tuples(st.sampled_from(sorted(PADS)), st.integers(1, 4), st.integers(0, 2)), max_size=3
    ),
    placeholders=st.sampled_from([None, PADS]),
)
def test_rows_whose_spans_fit_their_tokens_pass(lengths, placeholders):
    spans, at = [], 1
    for kind, size, gap in lengths:
        spans.append((kind, at, size))
        at += size + gap
    row = row_with(spans)
    row["token_ids"][-3:] = PADS["image"]
    assert check_media(row, placeholders) == sum(size for _, _, size in spans), (
        "sampled placeholders must not count"
    )
    assert media_ids([row]) == ({ID} if spans else set())


@given(at=st.integers(0, 18), placeholders=st.sampled_from([None, PADS]))
def test_a_placeholder_too_few_or_too_many_is_a_mismatch(at, placeholders):
    row = row_with([("image", 2, 5), ("image", 9, 3)])
    tokens = row["token_ids"]
    tokens[at] = 5 if tokens[at] == PADS["image"] else PADS["image"]
    with pytest.raises(BadRow, match=r"000000001\.00\.00: ") as caught:
        check_media(row, placeholders)
    assert caught.value.reason == "media_mismatch"


def test_rows_that_lost_their_spans_are_found():
    row = row_with([("audio", 2, 5)]) | {"spans": []}
    with pytest.raises(MediaMismatch, match="spans cover 0 media tokens, the row has 5"):
        check_media(row, PADS)


def test_media_tokens_of_a_row_must_agree_with_its_spans():
    row = row_with([("audio", 2, 5), ("image", 9, 3)])
    assert check_media(row | {"media_tokens": {ID: 8}}) == 8
    for wrong in ({ID: 7}, {ID: 8, "1" * 64: 1}, {}):
        with pytest.raises(
            MediaMismatch, match=r"spans cover . tokens of .*, media_tokens has ."
        ) as caught:
            check_media(row | {"media_tokens": wrong})
        assert caught.value.reason == "media_mismatch"
    with pytest.raises(
        MediaMismatch, match="media_tokens: found 8, expected a number for each media id"
    ):
        check_media(row | {"media_tokens": 8})


def test_sampled_tokens_are_no_media():
    with pytest.raises(
        MediaMismatch, match="image span at 18 has 4 tokens, 2 of them are the placeholder 901"
    ):
        check_media(row_with([("image", 18, 4)]))


def test_overlapping_spans_are_refused():
    with pytest.raises(MediaMismatch, match="image span at 4 overlaps"):
        check_media(row_with([("image", 2, 5), ("image", 4, 5)]))


GOOD = {"kind": "image", "start": 2, "length": 3, "media_id": ID}


@pytest.mark.parametrize(
    "span",
    [
        *({"kind": kind} for kind in ("smell", None, ["image"])),
        *({"start": start} for start in (-1, 40, 10**30, 1.0, True, None)),
        *({"length": length} for length in (0, 39, 10**30, "3")),
        *({"media_id": media_id} for media_id in (None, 7, ID[:-1])),
    ],
)
def test_malformed_spans_are_refused(span):
    with pytest.raises(MediaMismatch) as caught:
        check_media(row_with([("image", 2, 3)]) | {"spans": [GOOD | span]})
    assert caught.value.reason == "bad_span"


@pytest.mark.parametrize(
    "spans", [None, 7, "", {}, *([span] for span in (None, 7, "span", [], {"kind": "image"}))]
)
def test_spans_of_another_type_are_refused(spans):
    with pytest.raises(MediaMismatch) as caught:
        check_media(row_with([]) | {"spans": spans})
    assert caught.value.reason == "bad_span"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 9}, {}),
        ([], {}),
        ({"thinker_config": None}, {}),
        (
            {"image_token_id": 7, "video_token_id": 8, "audio_token_id": None},
            {"image": 7, "video": 8},
        ),
        ({"audio_token_index": 5}, {"audio": 5}),
        (
            {
                "image_token_id": 1,
                "thinker_config": {"image_token_index": 2, "audio_token_index": 3},
            },
            {"image": 2, "audio": 3},
        ),
    ],
)
def test_placeholders_are_those_of_the_model(tmp_path, config, expected):
    assert read_placeholders(tmp_path) == {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_placeholders(tmp_path) == expected


@pytest.fixture
def hashed(monkeypatch) -> dict[str, int]:
    """Hashed bytes by purpose: for names of media, and to find damage."""
    hashed_bytes = {"name": 0, "damage": 0}
    name, checksum = media.hash_content, media.xxhash.xxh3_128_digest

    def counted(purpose: str, real: Callable) -> Callable:
        def count(blob: memoryview, **options: int) -> object:
            hashed_bytes[purpose] += len(blob)
            return real(blob, **options)

        return count

    monkeypatch.setattr(media, "hash_content", counted("name", name))
    monkeypatch.setattr(media.xxhash, "xxh3_128_digest", counted("damage", checksum))
    return hashed_bytes


def test_bytes_are_hashed_once_by_the_writer_and_once_by_each_reader(store, hashed):
    media_id = store.put(bytes(1000))
    assert hashed == {"name": 1000, "damage": 1000}
    reader = MediaStore(store.folder)
    for _ in range(3):
        reader.check(media_id)
        reader.read(media_id)
    assert hashed == {"name": 1000, "damage": 2000}
    assert store.put(bytes(1000), media_id) == media_id, "the medium exists and has its name"
    reader.read(media_id, verify=False)
    assert hashed == {"name": 1000, "damage": 2000}


def test_another_put_of_a_medium_restarts_its_grace_and_needs_no_hash(store, hashed):
    media_id = store.put(bytes(1000))
    end_grace(store)
    reader = MediaStore(store.folder)
    for process in (store, reader):
        process.check(media_id)
    end_grace(store)
    before = dict(hashed)
    for _ in range(3):
        assert store.put(bytes(1000), media_id) == media_id
        reader.check(media_id)
        reader.read(media_id)
    assert hashed == before
    assert store.remove_unused([]) == [] and media_id in store.sizes()
    end_grace(store)
    assert store.remove_unused([]) == [media_id]


@pytest.mark.parametrize("change", ["bytes", "tail", "shorter", "replaced", "removed"])
def test_a_change_of_a_verified_medium_is_found(store, change):
    media_id = store.put(bytes(1000))
    store.check(media_id)
    path = store.folder / media_id
    os.utime(path, ns=(0, 0))
    store.check(media_id)
    whole = bytearray(path.read_bytes())
    whole[{"bytes": 500, "tail": -1}.get(change, 0)] ^= 1
    if change in ("bytes", "tail"):
        path.write_bytes(whole)
    elif change == "shorter":
        os.truncate(path, 999)
    elif change == "replaced":
        path.with_name("other").write_bytes(whole)
        path.with_name("other").replace(path)
    else:
        path.unlink()
    for use in (store.check, store.read):
        with pytest.raises(
            MediaError,
            match="No such file" if change == "removed" else "damaged: .* checksum after them",
        ):
            use(media_id)


def test_the_number_of_verified_media_in_memory_is_bounded(store, monkeypatch, hashed):
    monkeypatch.setattr(media, "_MAX_VERIFIED", 2)
    ids, reader = [store.put(bytes([number])) for number in range(3)], MediaStore(store.folder)
    for media_id in (*ids, ids[2], ids[0]):
        reader.check(media_id)
    assert hashed["damage"] == 3 + 4 and len(reader._verified) == len(store._verified) == 2
