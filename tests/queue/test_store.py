"""Shards of a process: readable at once, saved soon, their memory used again; over the bound they
are files."""

from __future__ import annotations

import multiprocessing
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, Mode, PlanesConfig, QueueConfig, SiteConfig
from relax_hpc.net.transport import ShmPlane, SlabPool, TcpPlane, rdma_agent, rdma_path
from relax_hpc.net.transport.choice import check_required
from relax_hpc.ops.checks.settings import check
from relax_hpc.queue.plan import GENERATED
from relax_hpc.queue.row_schema import BadRow
from relax_hpc.queue.storage.shard import ShardError
from relax_hpc.queue.storage.shard_files import ShardFiles
from relax_hpc.queue.storage.shard_store import (
    Descriptor,
    ShardReader,
    ShardStore,
    open_planes,
)
from tests.helpers.queue_helpers import make_run, rows_of

TOKEN = b"t" * 32
ORIGIN = {"group": "rollout", "incarnation": 1}
WAIT_S = 120.0


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
    row = reader.read(descriptor)["000000000.00.00"]
    tokens = row["token_ids"].tolist()
    reader.close()
    return dict(reader.plane_counts.shards), tokens


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
        big, is_saved = made.make(
            "big", rows_of([0], Version(1, 0), length=4000), GENERATED, ORIGIN
        )
        assert is_saved and big["planes"] == {} and made.read(big)
        assert made.pool.taken == 0 and "big" not in made.holds()


def test_what_is_not_wanted_leaves_no_file(tmp_path: Path) -> None:
    with store(tmp_path) as (made, _):
        made.make("a", rows_of([0], Version(1, 0)), GENERATED, ORIGIN)
        made.discard("a")
        with pytest.raises(BadRow):
            made.make(
                "b", [{**rows_of([1], Version(1, 0))[0], "reward": np.nan}], GENERATED, ORIGIN
            )
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


def test_the_way_that_is_taken_is_told_once_a_maker_and_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    pool = SlabPool()
    tcp = TcpPlane(TOKEN, "127.0.0.1")
    made = ShardStore(ShardFiles(tmp_path), [ShmPlane(TOKEN, pool), tcp], pool, 1 << 24, Saved())
    descriptors = []
    for number in range(4):
        name = f"rollout-i000001-{number:06d}.h5"
        descriptor, _ = made.make(name, rows_of([number], Version(1, 0)), GENERATED, ORIGIN)
        if number > 1:
            descriptor["planes"]["shm"]["node"] = "another"
        descriptors.append(descriptor)
    for descriptor in descriptors:
        made.read(descriptor)
    size = float(descriptors[0]["bytes"])
    first = {"queue/by_shm_shards": 2.0, "queue/by_tcp_shards": 2.0}
    assert made.plane_counts.take_metrics() == first | {
        "queue/by_shm_bytes": 2 * size,
        "queue/by_tcp_bytes": 2 * size,
    }
    assert made.plane_counts.take_metrics() == {}
    made.close()
    shm, other = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("queue: ")
    ]
    assert shm == "queue: shards of rollout-i000001 come by shm"
    assert re.fullmatch(
        "queue: shards of rollout-i000001 come by tcp, for shm: .*take another plane", other
    )


def planes_by_name(tmp_path: Path, config: Config) -> list[str]:
    run, pool = make_run(tmp_path / "run"), SlabPool()
    planes = open_planes(run, config, "rollout", "rollout-i000001", pool)
    for plane in planes:
        plane.close()
    pool.close()
    return [plane.name for plane in planes]


@pytest.mark.parametrize(
    ("modes", "names"),
    [
        ({}, ["shm", "tcp"]),
        ({"shm": "off"}, ["tcp"]),
        ({"shm": "off", "tcp": "off"}, []),
        ({"tcp": "required"}, ["shm", "tcp"]),
    ],
)
def test_planes_are_as_configured(tmp_path: Path, modes: dict[str, Mode], names: list[str]) -> None:
    config = Config(layout="local", queue=QueueConfig(planes=PlanesConfig(**modes)))
    assert planes_by_name(tmp_path, config) == names


def test_rdma_is_not_loaded_where_there_is_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setattr(rdma_path, "_FABRIC", tmp_path / "none")
    config = Config(layout="jobs", site=SiteConfig(interface="lo"))
    assert planes_by_name(tmp_path, config) == ["shm", "tcp"]
    assert (
        "queue: no plane rdma here: rdma: there is no InfiniBand card that NIXL knows"
        in capfd.readouterr().err
    )


def test_a_required_plane_that_is_not_there_ends_the_run_before_it_begins(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(rdma_agent, "_PACKAGES", ("no_such_package",))
    config = Config(layout="local", queue=QueueConfig(planes=PlanesConfig(rdma="required")))
    line = (
        "queue.planes.rdma: found required, but there is no package nixl-cu12; pip install "
        "--no-deps nixl-cu12; or set it to auto"
    )
    for refuses in (lambda: planes_by_name(tmp_path, config), lambda: check_required(config)):
        with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
            refuses()
    assert line in check(config)
    config.layout = "jobs"
    assert line not in check(config)


def test_a_shard_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with store(tmp_path) as (made, _):
        descriptor, _ = made.make("a", rows_of([0], Version(1, 0)), GENERATED, ORIGIN)
    with pytest.raises(ShardError, match="a: "):
        ShardReader(ShardFiles(tmp_path)).read(descriptor)
