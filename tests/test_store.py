"""Shards of a process: readable at once, saved soon, their memory used again; over the bound they are files."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.errors import RelaxError
from relax_hpc.transfer_queue.files import ShardFiles
from relax_hpc.transfer_queue.plan import GENERATED
from relax_hpc.transfer_queue.planes import ShmPlane, SlabPool
from relax_hpc.transfer_queue.schema import BadRow
from relax_hpc.transfer_queue.shard import ShardError
from relax_hpc.transfer_queue.store import Descriptor, ShardReader, ShardStore
from relax_hpc.versions import Version
from tests.queue_helpers import rows_of

TOKEN = b"t" * 32
ORIGIN = {"group": "rollout", "epoch": 1}
WAIT_S = 20.0


class Saved:
    """Collects what a store says it has saved."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.some = threading.Condition()

    def __call__(self, names: list[str]) -> None:
        with self.some:
            self.names += names
            self.some.notify_all()

    def wait(self, count: int) -> list[str]:
        with self.some:
            assert self.some.wait_for(lambda: len(self.names) >= count, WAIT_S)
            return self.names


@contextmanager
def store(folder: Path, max_bytes: int = 1 << 24) -> Iterator[tuple[ShardStore, Saved]]:
    pool, saved = SlabPool(), Saved()
    made = ShardStore(ShardFiles(folder), [ShmPlane(TOKEN, pool)], pool, max_bytes, saved)
    try:
        yield made, saved
    finally:
        made.close()


def read_elsewhere(folder: Path, descriptor: Descriptor) -> tuple[dict[str, int], list[int]]:
    """In another process: by what plane a shard was read, and its first row's tokens."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_read, (folder, descriptor))


def _read(folder: Path, descriptor: Descriptor) -> tuple[dict[str, int], list[int]]:
    reader = ShardReader(ShardFiles(folder), [ShmPlane(TOKEN, SlabPool())])
    row = reader.read(descriptor)["000000000.00"]
    tokens = row["token_ids"].tolist()
    reader.close()
    return reader.taken, tokens


def test_a_shard_is_readable_before_it_is_saved_and_after_its_maker_is_gone(tmp_path: Path) -> None:
    rows = rows_of([0, 1], Version(1, 0))
    with store(tmp_path) as (made, saved):
        descriptor, is_saved = made.make("a", rows, GENERATED, ORIGIN)
        assert not is_saved and not any(tmp_path.iterdir()) and made.holds() == []
        assert read_elsewhere(tmp_path, descriptor) == ({"shm": 1}, rows[0]["token_ids"].tolist())
        made.save("a")
        assert saved.wait(1) == ["a"] and made.holds() == ["a"]
    assert read_elsewhere(tmp_path, descriptor) == ({"file": 1}, rows[0]["token_ids"].tolist())


def test_memory_is_used_again_and_what_is_over_the_bound_is_a_file_at_once(tmp_path: Path) -> None:
    with store(tmp_path, max_bytes=8192) as (made, saved):
        for number in range(20):
            name = f"s{number}"
            _, is_saved = made.make(name, rows_of([number], Version(1, 0)), GENERATED, ORIGIN)
            assert not is_saved, "the memory of the one before it is free"
            made.save(name)
            saved.wait(number + 1)
            made.free(made.holds())
        big, is_saved = made.make("big", rows_of([0], Version(1, 0), length=4000), GENERATED, ORIGIN)
        assert is_saved and big["planes"] == {} and made.read(big)
        assert made.pool.taken == 0 and "big" not in made.holds()


def test_what_is_not_wanted_leaves_no_file(tmp_path: Path) -> None:
    with store(tmp_path) as (made, _):
        made.make("a", rows_of([0], Version(1, 0)), GENERATED, ORIGIN)
        made.discard("a")
        with pytest.raises(BadRow):
            made.make("b", [{**rows_of([1], Version(1, 0))[0], "reward": np.nan}], GENERATED, ORIGIN)
        assert made.pool.taken == 0
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_named_at_the_next_shard(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    with store(folder) as (made, _):
        made.make("a", rows_of([0], Version(1, 0)), GENERATED, ORIGIN)
        folder.rmdir()
        made.save("a")
        made._thread.join(WAIT_S)
        with pytest.raises(RelaxError, match="shards: cannot be written"):
            made.make("b", rows_of([1], Version(1, 0)), GENERATED, ORIGIN)


def test_a_shard_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with store(tmp_path) as (made, _):
        descriptor, _ = made.make("a", rows_of([0], Version(1, 0)), GENERATED, ORIGIN)
    with pytest.raises(ShardError, match="a: "):
        ShardReader(ShardFiles(tmp_path)).read(descriptor)
