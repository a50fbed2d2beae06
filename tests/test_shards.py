"""Shards: what goes in comes out, views are read-only, and a damaged byte anywhere is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.transfer_queue.client import Claim, read_rows
from relax_hpc.transfer_queue.plan import GENERATED
from relax_hpc.transfer_queue.shard import FilePlane, ShardError, pack, unpack
from relax_hpc.versions import Version
from tests.queue_helpers import rows_of

ORIGIN = {"group": "rollout", "epoch": 1}


def same(found: dict, expected: dict) -> bool:
    return all(np.array_equal(found[name], expected[name]) for name in expected)


@given(lengths=st.lists(st.integers(2, 40), max_size=6))
def test_rows_come_back_as_they_went_in(lengths):
    rows = [row for ticket, n in enumerate(lengths) for row in rows_of([ticket], Version(1, ticket), length=n)]
    if not rows:
        return
    found = unpack(pack(rows, GENERATED, ORIGIN))
    assert list(found) == [row["sample_id"] for row in rows]
    for row in rows:
        assert same(found[row["sample_id"]], row)
        assert found[row["sample_id"]]["token_ids"].dtype == np.int32


def test_unknown_fields_are_kept():
    rows = [{**row, "mood": {"a": [1]}} for row in rows_of([3], Version(1, 0))]
    assert unpack(pack(rows, (*GENERATED, "mood"), ORIGIN))["000000003.01"]["mood"] == {"a": [1]}


def test_mapped_rows_cannot_be_written(tmp_path):
    plane = FilePlane(tmp_path)
    descriptor = plane.publish("a.shard", pack(rows_of([0], Version(1, 0)), GENERATED, ORIGIN))
    row = plane.read(descriptor)["000000000.00"]
    with pytest.raises(ValueError, match="read-only"):
        row["token_ids"][0] = 1
    plane.forget(set())
    assert row["token_ids"][0] == 0, "rows outlive their plane's memory of the shard"


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_every_flipped_bit_is_refused(at, bit):
    record = bytearray(pack(rows_of([0, 1], Version(1, 0)), GENERATED, ORIGIN))
    record[at % len(record)] ^= 1 << bit
    with pytest.raises(ShardError, match=r"x\.shard"):
        unpack(bytes(record), "x.shard")


@pytest.mark.parametrize("size", [0, 1, 27, 28, 100, -1])
def test_a_truncated_shard_is_refused_by_name(tmp_path, size):
    record = pack(rows_of([0], Version(1, 0)), GENERATED, ORIGIN)
    (tmp_path / "cut.shard").write_bytes(record[:size])
    with pytest.raises(ShardError, match=r"cut\.shard"):
        FilePlane(tmp_path).read({"name": "cut.shard"})


@pytest.mark.parametrize("name", ["../token", "/etc/passwd", "a/b", ".hidden", "", "a\0b", 7])
def test_a_name_with_a_path_is_refused(tmp_path, name):
    plane = FilePlane(tmp_path)
    with pytest.raises(ShardError, match="no path"):
        plane.read({"name": name})
    with pytest.raises(ShardError, match="no path"):
        plane.publish(name, b"")


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(ShardError, match=r"gone\.shard"):
        FilePlane(tmp_path).read({"name": "gone.shard"})


def test_dropped_rows_in_a_shard_that_is_still_needed_do_not_show(tmp_path):
    """Ticket 1 was generated again, longer: its old log-probs lie beside ticket 0's, which count."""
    plane = FilePlane(tmp_path)
    first, again = rows_of([0, 1], Version(1, 1)), rows_of([1], Version(2, 0), length=9)
    stale = [{**row, "old_logprobs": row["rollout_logprobs"]} for row in first]
    shards = [
        {**plane.publish("a", pack(first, GENERATED, ORIGIN)), "tickets": [0]},
        {**plane.publish("b", pack(stale, ("old_logprobs",), ORIGIN)), "tickets": [0]},
        {**plane.publish("c", pack(again, GENERATED, ORIGIN)), "tickets": [1]},
    ]
    rows = read_rows(plane, Claim(1, 0, (0, 1), tuple(shards), 0), 2)
    assert [len(row["token_ids"]) for row in rows] == [5, 5, 9, 9]
    assert ["old_logprobs" in row for row in rows] == [True, True, False, False]
