"""Shards: what goes in comes out, views are read-only, and a damaged byte anywhere is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.versions import Version
from relax_hpc.queue.client import Claim, read_rows
from relax_hpc.queue.plan import GENERATED
from relax_hpc.queue.storage import record_file
from relax_hpc.queue.storage.shard import ShardError, pack, unpack
from relax_hpc.queue.storage.shard_files import ShardFiles
from tests.helpers.queue_helpers import rows_of

ORIGIN = {"group": "rollout", "incarnation": 1}


def packed(rows: list[dict], fields: tuple[str, ...] = GENERATED) -> memoryview:
    return pack(rows, fields, ORIGIN)


def same(found: dict, expected: dict) -> bool:
    return all(np.array_equal(found[name], expected[name]) for name in expected)


@given(lengths=st.lists(st.integers(2, 40), max_size=6))
def test_rows_come_back_as_they_went_in(lengths):
    rows = [
        row
        for ticket, n in enumerate(lengths)
        for row in rows_of([ticket], Version(1, ticket), length=n)
    ]
    if not rows:
        return
    found = unpack(packed(rows))
    assert list(found) == [row["row_id"] for row in rows]
    for row in rows:
        assert same(found[row["row_id"]], row)
        assert found[row["row_id"]]["token_ids"].dtype == np.int32


def test_unknown_fields_are_kept():
    rows = [{**row, "mood": {"a": [1]}} for row in rows_of([3], Version(1, 0))]
    assert unpack(packed(rows, (*GENERATED, "mood")))["000000003.01.00"]["mood"] == {"a": [1]}


def test_mapped_rows_cannot_be_written(tmp_path):
    files = ShardFiles(tmp_path)
    descriptor = files.write("a.h5", packed(rows_of([0], Version(1, 0))))
    row = files.read(descriptor)["000000000.00.00"]
    with pytest.raises(ValueError, match="read-only"):
        row["token_ids"][0] = 1
    files.forget(set())
    assert row["token_ids"][0] == 0, "rows outlive their plane's memory of the shard"


@pytest.mark.parametrize("size", [0, 1, 23, 24, 100, -1])
def test_a_cut_record_is_refused_by_name(size):
    with pytest.raises(ShardError, match="cut"):
        unpack(packed(rows_of([0], Version(1, 0)))[:size], "cut")


@pytest.mark.parametrize("size", range(24))
def test_a_shard_of_few_bytes_is_refused_by_name(size: int, tmp_path: Path) -> None:
    """As a power loss or a full disk leaves it: its rows are then generated again."""
    path = tmp_path / "rollout-i000001-1-00000000-000001.shard"
    path.write_bytes((b"RLXSHARD" + bytes(16))[:size])
    with pytest.raises(ShardError, match=path.name):
        record_file.read(path)


@pytest.mark.parametrize("name", ["../token", "/etc/passwd", "a/b", ".hidden", "", "a\0b", 7])
def test_a_name_with_a_path_is_refused(tmp_path, name):
    files = ShardFiles(tmp_path)
    with pytest.raises(ShardError, match="no path"):
        files.read({"name": name})
    with pytest.raises(ShardError, match="no path"):
        files.write(name, memoryview(b""))


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(ShardError, match=r"gone\.h5"):
        ShardFiles(tmp_path).read({"name": "gone.h5"})


def test_dropped_rows_in_a_shard_that_is_still_needed_do_not_show(tmp_path):
    """Ticket 1 was generated again, longer: its old log-probs lie beside ticket 0's, which
    count."""
    files = ShardFiles(tmp_path)
    first, again = rows_of([0, 1], Version(1, 1)), rows_of([1], Version(2, 0), length=9)
    stale = [{**row, "old_logprobs": row["rollout_logprobs"]} for row in first]
    shards = [
        {**files.write("a", packed(first)), "tickets": [0]},
        {**files.write("b", packed(stale, ("old_logprobs",))), "tickets": [0]},
        {**files.write("c", packed(again)), "tickets": [1]},
    ]
    rows = read_rows(files, Claim(1, 0, (0, 1), tuple(shards), 0, episodes=(b"\1\1",) * 2))
    assert [len(row["token_ids"]) for row in rows] == [5, 5, 9, 9]
    assert ["old_logprobs" in row for row in rows] == [True, True, False, False]
