"""The queue without the rest of the toolkit: its example works as it is printed, and no torch comes
with it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import relax_hpc.queue as package
from relax_hpc.base.errors import RefusedError
from relax_hpc.config.schema import PlanesConfig
from relax_hpc.queue import Claim, QueueClient, Version, serving
from relax_hpc.queue.client import read_columns
from relax_hpc.queue.plan import GENERATED
from relax_hpc.queue.storage.shard import pack
from relax_hpc.queue.storage.shard_files import ShardFiles
from relax_hpc.queue.storage.shard_store import ShardReader
from tests.helpers.plane_helpers import plane_here
from tests.helpers.queue_helpers import Roles, make_run, rows_of, small

EXAMPLE = """
import doctest, sys
import relax_hpc.queue as package
found = doctest.testmod(package)
assert found.attempted > 10 and not found.failed, found
assert "torch" not in sys.modules
"""


def test_the_example_works_and_does_not_import_torch():
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLE], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_is_there_and_explained():
    for name in package.__all__:
        assert name == "FIELDS" or getattr(package, name).__doc__, name


def test_a_run_is_gone_on_with_by_the_next_who_serves_it(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with serving(run, config), QueueClient(run, config, "actor", 1) as client:
        client.connection.call("resume", step=0)
    with serving(run, config) as controller, QueueClient(run, config, "actor", 1) as client:
        assert controller.incarnation == 2 and controller.state.lineage.starts == [(1, 0)]
        assert client.connection.call("status")["incarnations"] == {"actor": 1}


def test_arrays_that_the_schema_does_not_know_are_carried(tmp_path):
    run, config = make_run(tmp_path / "run"), small(1, 2)
    config.queue.planes = planes_of()
    with (
        serving(run, config),
        QueueClient(run, config, "actor", 1) as actor,
        QueueClient(run, config, "rollout", 1) as it,
    ):
        actor.connection.call("resume", step=0)
        actor.connection.call("publish", version="i000001-v000000", digest="d")
        it.connection.call("serve", reader="r", version="i000001-v000000")
        tickets = it.connection.call("admit", reader="r", count=1)["tickets"]
        mine = {
            "bits": np.array([True, False]),
            "halves": np.arange(3, dtype=np.float16),
            "whole": np.arange(9),
        }
        rows = [{**row, **mine} for row in rows_of(tickets, Version(1, 0))]
        with pytest.raises(RefusedError, match="mine: found an array of <U1"):
            it.put(
                [{**row, "mine": np.array(["a"])} for row in rows], ["token_ids", "reward", "mine"]
            )
        assert it.put(rows, [name for name in rows[0] if name != "row_id"]) == {}
        it.settle()
        claim = actor.claim("reference", 1 << 20)
        for row in actor.rows(claim):
            for name, expected in mine.items():
                assert row[name].dtype == expected.dtype and np.array_equal(row[name], expected)


def planes_of(*names: str) -> PlanesConfig:
    """These and no others."""
    return PlanesConfig(
        **{name: "auto" if name in names else "off" for name in ("shm", "rdma", "tcp")}
    )


@pytest.mark.parametrize("planes", [[], ["shm"], ["tcp"]])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("size", [64, 1 << 16])
def test_columns_are_rows_end_to_end(tmp_path, planes, shards, size):
    """Also in memory of the reader, if there is room."""
    run, config = make_run(tmp_path / "run"), small()
    config.queue.planes = planes_of(*planes)
    with serving(run, config), Roles(run, config) as roles:
        version = roles.start()
        tickets = roles.admit(version)
        for part in (tickets,) if shards == 1 else ([ticket] for ticket in tickets):
            assert roles["rollout"].put_generated(rows_of(part, version, length=4 + part[0])) == {}
        roles["rollout"].settle()
        claim = roles["reference"].claim("reference", 1 << 20)
        rows = roles["reference"].rows(claim)
        fields = ["token_ids", "reward", "finish_reason"]
        room = np.zeros(size, np.uint8)
        columns = roles["reference"].columns(claim, fields, memoryview(room))
        assert np.shares_memory(columns["token_ids"].flat, room) == (
            bool(planes) and shards == 1 and size > 64
        )
        assert list(columns) == fields
        assert columns["token_ids"].lengths == [len(row["token_ids"]) for row in rows]
        assert np.array_equal(
            columns["token_ids"].flat, np.concatenate([row["token_ids"] for row in rows])
        )
        assert columns["reward"].flat.tolist() == [row["reward"] for row in rows]
        assert columns["finish_reason"].values == ["stop"] * len(rows)
        with pytest.raises(LookupError, match="nothing"):
            roles["reference"].columns(claim, ["nothing"])
        assert list(roles["reference"].store.plane_counts.shards) == (planes or ["file"])


def test_columns_leave_out_rows_that_were_generated_again(tmp_path):
    version, files = Version(1, 0), ShardFiles(tmp_path)
    first, again = (rows_of(tickets, version, length=n) for tickets, n in (([0, 1], 4), ([1], 7)))
    with plane_here("shm") as shm:
        shards = []
        for name, rows, tickets in (("a", first, [0]), ("b", again, [1])):
            record = pack(rows, GENERATED, {"group": "rollout", "incarnation": 1})
            planes = {"shm": shm.publish(name, record)}
            shards.append(
                {"name": name, "bytes": len(record), "planes": planes, "tickets": tickets}
            )
        reader = ShardReader(files, [shm])
        for tickets, expected in (((0, 1), [4, 4, 7, 7]), ((1,), [7, 7])):
            claim = Claim(
                1,
                0,
                tickets,
                tuple(shards[2 - len(tickets) :]),
                0,
                episodes=(b"\1\1",) * len(tickets),
            )
            assert read_columns(reader, claim, ["token_ids"])["token_ids"].lengths == expected
