"""The durable copy: what goes in comes out, strangers can read it with h5py alone, and damage is
named."""

from __future__ import annotations

import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import h5py
import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.fields import FIELDS
from relax_hpc.base.versions import Version
from relax_hpc.queue.plan import GENERATED
from relax_hpc.queue.storage import hdf5
from relax_hpc.queue.storage.columns import parse_columns
from relax_hpc.queue.storage.hdf5 import read
from relax_hpc.queue.storage.hdf5_writer import write
from relax_hpc.queue.storage.shard import ShardError, pack, unpack
from tests.helpers.queue_helpers import learned, rows_of

ORIGIN = {"group": "rollout", "incarnation": 1}
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary()
)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
NAMES = st.text() | st.sampled_from(
    ["offsets", "offsets1", ".", "..", "a/b", "%", "", "\0", "row_ids"]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of two prompt groups."""
    return written(tmp_path_factory.mktemp("shards") / "whole.h5", rows_of([0, 1], Version(1, 0)))


def written(
    path: Path, rows: list[dict[str, Any]], fields: tuple[str, ...] = GENERATED, sync: bool = False
) -> Path:
    columns = parse_columns(pack(rows, fields, ORIGIN))
    write(path, columns, {"run": "runs/a", **columns.origin}, sync)
    return path


def same(one: Any, other: Any) -> bool:
    """Equal with all types, NaN being equal to NaN."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return msgpack.packb(one, default=lambda number: number.item()) == msgpack.packb(
        other, default=lambda number: number.item()
    )


# -- what goes in comes out ------------------------------------------------------------------------


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=5), data=st.data())
def test_a_file_carries_the_rows_that_a_record_carries(tmp_path_factory, lengths, data):
    names = data.draw(
        st.lists(
            NAMES.filter(lambda name: name not in FIELDS and _packable(name)),
            max_size=3,
            unique=True,
        )
    )
    rows = [
        row
        for ticket, n in enumerate(lengths)
        for row in rows_of([ticket], Version(1, ticket), length=n)
    ]
    for row in rows:
        row |= {
            name: data.draw(VALUES.filter(lambda value: value is not None and _packable(value)))
            for name in names
        }
    record = pack(rows, (*GENERATED, *names), ORIGIN)
    path = tmp_path_factory.mktemp("rows") / "a.h5"
    columns = parse_columns(record)
    write(path, columns, columns.origin, sync=False)
    found, expected = read(path), unpack(record)
    assert list(found) == list(expected)
    for name, row in expected.items():
        assert found[name].keys() == row.keys() and all(
            same(found[name][field], row[field]) for field in row
        )


def _packable(value: Any) -> bool:
    """Whether a record can carry it: no half of a UTF-16 pair."""
    try:
        return bool(msgpack.packb(value))
    except (UnicodeError, ValueError, OverflowError):
        return False


def test_fields_without_the_tokens_themselves(tmp_path):
    rows = learned(rows_of([3, 4], Version(1, 0), length=7), Version(1, 0))
    row = read(written(tmp_path / "a.h5", rows, ("old_logprobs", "old_logprob_version")))[
        "000000004.01.00"
    ]
    assert np.array_equal(row["old_logprobs"], rows[-1]["rollout_logprobs"])
    assert row["old_logprob_version"] == Version(1, 0).encode() and set(row) == {
        "row_id",
        "old_logprobs",
        "old_logprob_version",
    }


def test_rows_of_different_lengths_a_field(tmp_path):
    """Nothing says that per-token fields of another task are as long as each other."""
    rows = [
        {
            "row_id": "000000001.00.00",
            "ref_logprobs": np.ones(3, "f4"),
            "advantages": np.ones(5, "f4"),
        }
    ]
    row = read(written(tmp_path / "a.h5", rows, ("ref_logprobs", "advantages")))["000000001.00.00"]
    assert (len(row["ref_logprobs"]), len(row["advantages"])) == (3, 5)


def test_rows_are_views_that_cannot_be_written_and_outlive_the_file(tmp_path):
    path = written(tmp_path / "a.h5", rows_of([0], Version(1, 0)))
    row = read(path)["000000000.00.00"]
    path.unlink()
    with pytest.raises(ValueError, match="read-only"):
        row["token_ids"][0] = 1
    assert row["token_ids"].tolist() == [0, 1, 2, 3, 4] and not row["token_ids"].flags.owndata


def test_no_row_at_all(tmp_path):
    assert read(written(tmp_path / "a.h5", [])) == {}


def test_reading_does_not_need_the_library(whole, monkeypatch):
    """It has one lock for all threads and does not survive a fork."""
    monkeypatch.setattr(h5py, "File", None)
    assert len(read(whole)) == 4


def test_threads_write_at_once(tmp_path):
    rows = rows_of(range(8), Version(1, 0), length=100)
    paths = [tmp_path / f"{number}.h5" for number in range(12)]
    threads = [threading.Thread(target=written, args=(path, rows)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(len(read(path)) == 16 for path in paths)
    assert sorted(tmp_path.iterdir()) == sorted(paths)


# -- on disk ---------------------------------------------------------------------------------------


def test_the_file_appears_whole_and_synced(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: done.append(Path(f"/proc/self/fd/{fd}").readlink().name) or fsync(fd),
    )
    monkeypatch.setattr(
        Path, "replace", lambda old, new: done.append("rename") or replace(old, new)
    )
    written(tmp_path / "a.h5", rows_of([0], Version(1, 0)), sync=True)
    assert done[0].startswith(".a.h5.") and done[1:] == ["rename", tmp_path.name]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "a.h5", rows_of([0], Version(1, 0)))
    assert list(tmp_path.iterdir()) == []


# -- by strangers ----------------------------------------------------------------------------------


def test_h5py_alone_reads_and_explains_it(tmp_path):
    rows = [{**row, "mood": {"a": [1]}} for row in rows_of([3, 4], Version(1, 0), length=6)]
    with h5py.File(written(tmp_path / "a.h5", rows, (*GENERATED, "mood")), "r") as file:
        about = dict(file.attrs)
        assert (about["run"], about["group"], about["incarnation"], about["rows"]) == (
            "runs/a",
            "rollout",
            1,
            4,
        )
        assert (about["format"], about["format_version"]) == (
            "relax_hpc shard",
            2,
        ) and "offsets" in about["layout"]
        ids = json.loads(file["row_id"][()])
        tokens, offsets = file["token_ids"], file[file["token_ids"].attrs["offsets"]]
        for number, row in enumerate(rows):
            assert ids[number] == row["row_id"]
            assert np.array_equal(tokens[offsets[number] : offsets[number + 1]], row["token_ids"])
        assert file["prompt_len"][:].tolist() == [2, 2, 2, 2]
        assert json.loads(file["finish_reason"][()]) == ["stop"] * 4
        assert json.loads(file["mood"][()])[1] == {"a": [1]}
        for name in GENERATED:
            assert file[name].attrs["meaning"] == FIELDS[name].meaning
            assert not FIELDS[name].is_number or file[name].dtype == FIELDS[name].dtype
        assert (
            file["rollout_logprobs"].attrs["unit"] == "nats"
            and file["rollout_logprobs"].attrs["kind"] == "token"
        )


def test_datasets_can_be_mapped_where_h5py_says_that_they_lie(whole):
    digest = xxhash.xxh3_64()
    with h5py.File(whole, "r") as file, whole.open("rb") as raw:
        mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        for name in json.loads(file.attrs["digest_of"]):
            at, size = file[name].id.get_offset(), file[name].id.get_storage_size()
            assert at % 64 == 0 and mapped[at : at + size] == file[name][()].tobytes().ljust(
                size, b"\0"
            )
            digest.update(mapped[at : at + size])
        assert digest.hexdigest() == file.attrs["digest"]


# -- damage ----------------------------------------------------------------------------------------


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_meant_nothing(whole, at, bit):
    """What only strangers read, and what lies between the datasets, has no part in our rows."""
    damaged = bytearray(whole.read_bytes())
    damaged[at % len(damaged)] ^= 1 << bit
    path = whole.with_name("flipped.h5")
    path.write_bytes(damaged)
    try:
        found = read(path)
    except ShardError as error:
        assert "flipped.h5" in str(error)
    else:
        assert all(
            same(row[field], read(whole)[name][field])
            for name, row in found.items()
            for field in row
        )


def test_every_bit_of_a_row_counts(whole):
    good, path = whole.read_bytes(), whole.with_name("flipped.h5")
    with h5py.File(whole, "r") as file:
        places = [(file[name].id.get_offset(), file[name].id.get_storage_size()) for name in file]
    first_lines = good.index(b"\n\0")
    for at, size in [(0, first_lines), *places]:
        for spot in (at, at + size // 2, at + size - 1):
            path.write_bytes(good[:spot] + bytes([good[spot] ^ 4]) + good[spot + 1 :])
            with pytest.raises(
                ShardError, match=r"flipped\.h5: (checksum|not a shard|a shard of format|\d+ bytes)"
            ):
                read(path)


@given(size=st.integers(0, 10**6))
def test_a_cut_file_is_refused_by_name(whole, size):
    good, path = whole.read_bytes(), whole.with_name("cut.h5")
    path.write_bytes(good[: size % len(good)])
    with pytest.raises(ShardError, match=r"cut\.h5"):
        read(path)


@given(data=st.data())
def test_a_forged_index_is_refused(whole, data):
    """With all checksums right: somebody wrote it on purpose."""
    good = whole.read_bytes()
    _, index, rest = good.split(b"\n", 2)
    entries = json.loads(index)
    wrong = st.sampled_from([-1, 10**30, "O", "S0", "", None, [], {}, 1.5, "token", "json"])
    for _ in range(data.draw(st.integers(1, 3))):
        entry = data.draw(st.sampled_from(entries))
        entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(wrong)
    forged = data.draw(st.sampled_from([entries, {}, [1], None, entries[:1], entries[1:]]))
    path = whole.with_name("forged.h5")
    path.write_bytes(_signed(good, forged, rest))
    try:
        assert isinstance(read(path), dict)
    except ShardError as error:
        assert "forged.h5" in str(error)


def _signed(good: bytes, index: Any, rest: bytes) -> bytes:
    text, digest = json.dumps(index).encode(), xxhash.xxh3_64()
    for entry in index if isinstance(index, list) else ():
        try:
            digest.update(hdf5._view(entry, memoryview(good)).tobytes())
        except (LookupError, TypeError, ValueError, ArithmeticError):
            break
    for _ in range(2):
        about = digest.intdigest(), len(text), xxhash.xxh3_64_intdigest(text)
        line = hdf5.FIRST_LINE.format(1, len(good), *about).encode()
        good = line + text + b"\n" + rest
    return good


@pytest.mark.parametrize(
    "content", [b"", b"\x89HDF\r\n\x1a\n", b"relax_hpc shard ", b"RLXSHARD" + bytes(99)]
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "other.h5").write_bytes(content)
    with pytest.raises(ShardError, match=r"other\.h5: "):
        read(tmp_path / "other.h5")


def test_files_of_others_are_refused(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["token_ids"] = np.arange(10)
    for name in ("other.h5", "gone.h5", "."):
        with pytest.raises(ShardError, match=name):
            read(tmp_path / name)


def test_a_later_format_is_named(whole, tmp_path):
    later = whole.read_bytes().replace(b"shard 2:", b"shard 7:", 1)
    (tmp_path / "later.h5").write_bytes(later)
    with pytest.raises(ShardError, match=r"later\.h5: a shard of format 7, this program reads 2"):
        read(tmp_path / "later.h5")
