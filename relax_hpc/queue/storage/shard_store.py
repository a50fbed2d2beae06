"""The shards of one process: what it makes, in memory at once and on disk soon after, and what it
reads of others'."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.network import own_address
from relax_hpc.net.transport import Plane, PlaneError, Slab, SlabPool
from relax_hpc.net.transport.choice import make_planes, missing_plane, planes_wanted
from relax_hpc.queue.client.plane_log import FILE, PlaneCounts
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.columns import Columns, columns_of
from relax_hpc.queue.storage.shard import ShardError, check_name, pack, unpack
from relax_hpc.queue.storage.shard_files import ShardFiles

Descriptor = dict[str, Any]
_Parsed = TypeVar("_Parsed")
_READ_S = 10.0
"""Seconds of a read on a plane in memory; the file comes next."""


class ShardReader:
    """Reads by the best plane that both sides have, the file last. Shards stay mapped until they
    are forgotten."""

    def __init__(self, files: ShardFiles, planes: Sequence[Plane] = ()) -> None:
        self.files, self.planes = files, planes
        self.plane_counts = PlaneCounts()
        self._open: dict[str, dict[str, Row]] = {}

    def read(self, descriptor: Descriptor) -> dict[str, Row]:
        """Rows of a shard by row id, as views; ShardError if it can be had nowhere."""
        name = check_name(descriptor["name"])
        if name not in self._open:
            why_not: list[str] = []
            rows = self._from_memory(name, descriptor, unpack, why_not)
            self._open[name] = self._from_file(descriptor, why_not) if rows is None else rows
        return self._open[name]

    def columns(self, descriptor: Descriptor, room: memoryview | None = None) -> Columns | None:
        """A shard by field, as views, of ``room`` if all of it fits there; None if it is not to be
        had from memory."""

        def parse(record: memoryview, name: str) -> Columns:
            if room is not None and len(record) <= len(room):
                # In one piece: several, if large, take half as long again, going through the cache.
                room[: len(record)] = record
                record = room[: len(record)]
            return columns_of(record, name)

        return self._from_memory(check_name(descriptor["name"]), descriptor, parse, [])

    def _from_memory(
        self,
        name: str,
        descriptor: Descriptor,
        parse: Callable[[memoryview, str], _Parsed],
        why_not: list[str],
    ) -> _Parsed | None:
        """Shard parsed from the first plane that brings it, or None; ``why_not`` gets what went
        wrong with others."""
        offers = descriptor.get("planes")
        for plane in self.planes:
            if isinstance(offers, dict) and isinstance(offer := offers.get(plane.name), dict):
                try:
                    parsed = parse(plane.read(offer, _READ_S), f"{plane.name}:{name}")
                except (PlaneError, ShardError) as error:
                    why_not.append(str(error))
                    continue
                self.plane_counts.count(descriptor, plane.name, plane.path(offer), why_not)
                return parsed
        return None

    def _from_file(self, descriptor: Descriptor, why_not: list[str]) -> dict[str, Row]:
        rows = self.files.read(descriptor)
        self.plane_counts.count(descriptor, FILE, FILE, why_not)
        return rows

    def forget(self, keep: set[str]) -> None:
        """Drop all shards that are not in ``keep``."""
        self._open = {name: rows for name, rows in self._open.items() if name in keep}
        self.files.forget(keep)

    def close(self) -> None:
        for plane in self.planes:
            plane.close()


class ShardStore(ShardReader):
    """Reader that also makes shards: readable at once, saved when asked for.

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
        """Error by which files can be written no more. A disk that is full for a while is no
        reason: it is waited for."""
        self._held: dict[str, Slab] = {}
        self._unwritten: dict[str, memoryview] = {}
        self._to_write: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._save, name="shards", daemon=True)
        self._thread.start()

    def make(
        self, name: str, rows: Sequence[Row], fields: Sequence[str], origin: Mapping[str, Any]
    ) -> tuple[Descriptor, bool]:
        """Pack rows into a shard; its descriptor, and whether it is saved already. BadRow as `pack`
        says."""
        check_name(name)
        if self.failure:
            raise RelaxError(
                f"{self.files.folder}: cannot be written: {self.failure}; free space, then resume"
            )
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
            self.files.write_some({name: record}, until=lambda: False)
            return {"name": name, "bytes": len(record), "planes": {}}, True
        with self._lock:
            self._held[name] = slabs[0]
            self._unwritten[name] = record
        offers = {}
        for plane in self.planes:
            with contextlib.suppress(PlaneError):
                offers[plane.name] = plane.publish(name, record)
        return {"name": name, "bytes": len(record), "planes": offers}, False

    def save(self, name: str) -> None:
        """Have the file of a shard written soon."""
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
        """Free the memory of shards that nobody needs any more."""
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
        """Write the files of what is to be saved, all that there are at a time, and tell of
        them."""
        while names := self._next_names():
            try:
                self.files.write_some(
                    {name: self._unwritten[name] for name in names}, until=self._closing.is_set
                )
            except OSError as error:
                with self._lock:
                    self.failure = error
                    self._lock.notify_all()
                return
            self.on_saved(names)
            with self._lock:
                for name in names:
                    self._unwritten.pop(name, None)
                self._lock.notify_all()

    def _next_names(self) -> list[str]:
        """Wait for a name; all names that there are then. Empty: the end."""
        names = [self._to_write.get()]
        with contextlib.suppress(queue.Empty):
            while names[-1] is not None:
                names.append(self._to_write.get_nowait())
        if names[-1] is None:
            # For the next call, which then has nothing to write.
            self._to_write.put(None)
        return [name for name in names if name is not None]

    def close(self) -> None:
        """Write what is to be saved, if that can be now, and give all memory back."""
        self._closing.set()
        self._to_write.put(None)
        self._thread.join()
        super().close()
        self.free(list(self._held))
        self.pool.close()


def planes_of(run: RunDir, config: Config, group: str, owner: str, pool: SlabPool) -> list[Plane]:
    """The planes in memory that process ``owner`` of ``group`` offers and reads by, the best first.

    ConfigError if one is required and cannot be had.
    """
    modes = planes_wanted(config)
    # A maker whose group is taken for dead after so long is not waited for beyond that.
    silence_s = config.liveness.lease_s
    planes, absent = make_planes(
        modes, run.token(), pool, own_address(config, group), owner, silence_s
    )
    for name, why in absent.items():
        if modes[name] == "required":
            raise ConfigError(missing_plane(name, why))
        print(f"queue: no plane {name} here: {why}", file=sys.stderr, flush=True)
    return list(planes.values())


def files_of(run: RunDir, config: Config) -> ShardFiles:
    """The files of the shards of a run, as durable as its configuration says."""
    return ShardFiles(run.shards, durable=config.queue.durability == "commit")
