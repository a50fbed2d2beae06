"""The shards of one process: what it makes, in memory at once and on disk soon after, and what it reads of others'."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax_hpc.config.schema import Config
from relax_hpc.errors import RelaxError
from relax_hpc.rendezvous.network import own_address
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.files import ShardFiles
from relax_hpc.transfer_queue.planes import Plane, PlaneError, ShmPlane, Slab, SlabPool, TcpPlane
from relax_hpc.transfer_queue.schema import Row
from relax_hpc.transfer_queue.shard import ShardError, check_name, pack, unpack

Descriptor = dict[str, Any]
_READ_S = 10.0
"""Deadline of a read on a plane in memory; the file comes next."""


class ShardReader:
    """Reads by the best plane that both sides have, the file last. Shards stay mapped until they are forgotten."""

    def __init__(self, files: ShardFiles, planes: Sequence[Plane] = ()) -> None:
        self.files, self.planes = files, planes
        self.taken: dict[str, int] = {}
        """Plane -> shards that were read by it."""
        self._open: dict[str, dict[str, Row]] = {}

    def read(self, descriptor: Descriptor) -> dict[str, Row]:
        """Rows of a shard by sample id, as views; ShardError if it can be had nowhere."""
        name = check_name(descriptor["name"])
        if name not in self._open:
            self._open[name] = self._from_memory(name, descriptor) or self._from_file(descriptor)
        return self._open[name]

    def _from_memory(self, name: str, descriptor: Descriptor) -> dict[str, Row] | None:
        for plane in self.planes:
            if offer := descriptor.get("planes", {}).get(plane.name):
                try:
                    record = plane.read(offer, _READ_S)
                    rows = unpack(record, f"{plane.name}:{name}")
                except (PlaneError, ShardError):
                    continue
                self._count(plane.name)
                return rows
        return None

    def _from_file(self, descriptor: Descriptor) -> dict[str, Row]:
        rows = self.files.read(descriptor)
        self._count("file")
        return rows

    def _count(self, plane: str) -> None:
        self.taken[plane] = self.taken.get(plane, 0) + 1

    def forget(self, keep: set[str]) -> None:
        """Drop all shards that are not in ``keep``."""
        self._open = {name: rows for name, rows in self._open.items() if name in keep}
        self.files.forget(keep)

    def close(self) -> None:
        for plane in self.planes:
            plane.close()


class ShardStore(ShardReader):
    """Also makes shards: readable at once, saved when asked for.

    ``on_saved(names)`` is called, in another thread, when the files of some are written.
    Beyond ``max_bytes`` of memory a shard is made on disk alone, before `make` returns.
    """

    def __init__(
        self,
        files: ShardFiles,
        planes: Sequence[Plane],
        pool: SlabPool,
        max_bytes: int,
        on_saved: Callable[[list[str]], None],
    ) -> None:
        super().__init__(files, planes)
        self.pool, self.max_bytes, self.on_saved = pool, max_bytes, on_saved
        self._lock = threading.Condition()
        self.failure: OSError | None = None
        """Why files can be written no more."""
        self._held: dict[str, Slab] = {}
        self._unwritten: dict[str, memoryview] = {}
        self._to_write: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._save, name="shards", daemon=True)
        self._thread.start()

    def make(
        self, name: str, rows: Sequence[Row], fields: Sequence[str], origin: Mapping[str, Any]
    ) -> tuple[Descriptor, bool]:
        """Pack rows into a shard; its descriptor, and whether it is saved already. BadRow as `pack` says."""
        check_name(name)
        if self.failure:
            raise RelaxError(f"{self.files.folder}: cannot be written: {self.failure}; free space, then resume")
        slabs: list[Slab] = []

        def allocate(size: int) -> memoryview:
            if self.pool.taken + size > self.max_bytes:
                return memoryview(bytearray(size))
            slabs.append(self.pool.take(size))
            return slabs[0].memory

        try:
            record = pack(rows, fields, dict(origin), allocate)
        except BaseException:
            for slab in slabs:
                self.pool.give_back(slab)
            raise
        if not slabs:
            return {**self.files.write(name, record), "planes": {}}, True
        with self._lock:
            self._held[name] = slabs[0]
            self._unwritten[name] = record
        offers = {}
        for plane in self.planes:
            with contextlib.suppress(PlaneError):
                offers[plane.name] = plane.publish(name, record)
        return {"name": name, "bytes": len(record), "planes": offers}, False

    def save(self, name: str) -> None:
        """Have the file of a shard written, soon."""
        self._to_write.put(name)

    def holds(self) -> list[str]:
        """Names of the shards in memory that are known to be on disk too."""
        with self._lock:
            return [name for name in self._held if name not in self._unwritten]

    def discard(self, name: str) -> None:
        """A shard that is not to be saved: the queue wants nothing of it."""
        with self._lock:
            self._unwritten.pop(name, None)
        self.free([name])

    def free(self, names: Sequence[str]) -> None:
        """Nobody needs these any more: their memory is used again."""
        for name in names:
            with self._lock:
                slab = self._held.pop(name, None)
            if slab:
                for plane in self.planes:
                    plane.retire(name)
                self.pool.give_back(slab)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that is to be saved has been; whether it has."""
        with self._lock:
            done = self._lock.wait_for(lambda: self.failure or not self._unwritten, timeout_s)
            return bool(done) and not self.failure

    def _save(self) -> None:
        """Write the files of what is to be saved, and tell of all that are written by then."""
        while names := self._write_some():
            self.on_saved(names)
            with self._lock:
                for name in names:
                    self._unwritten.pop(name, None)
                self._lock.notify_all()

    def _write_some(self) -> list[str]:
        """Wait for one and write all that there are; their names. Empty: the end, or the disk failed."""
        names: list[str] = []
        while not (names and self._to_write.empty()):
            if (name := self._to_write.get()) is None:
                # For the next call, which then has nothing to write.
                self._to_write.put(None)
                break
            try:
                self.files.write(name, self._unwritten[name])
            except OSError as error:
                with self._lock:
                    self.failure = error
                    self._lock.notify_all()
                return []
            names.append(name)
        return names

    def close(self) -> None:
        """Write what is to be saved, and give all memory back."""
        self._to_write.put(None)
        self._thread.join()
        super().close()
        self.free(list(self._held))
        self.pool.close()


def planes_of(run: RunDir, config: Config, group: str, pool: SlabPool) -> list[Plane]:
    """The planes in memory that a process of ``group`` offers and reads by, the best first."""
    makers = {
        "shm": lambda: ShmPlane(run.token(), pool),
        "tcp": lambda: TcpPlane(run.token(), own_address(config, group)),
    }
    return [makers[name]() for name in config.queue.planes]


def files_of(run: RunDir, config: Config) -> ShardFiles:
    """The files of the shards of a run, as durable as its configuration says."""
    return ShardFiles(run.shards, durable=config.queue.durability == "commit")
