"""The shards of one process: those that it makes, in memory immediately and on disk later, and
those of others that it reads."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.network import own_address
from relax_hpc.net.transport import Plane, PlaneError, Slab, SlabPool
from relax_hpc.net.transport.choice import make_planes, missing_plane, planes_wanted
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.columns import Columns, parse_columns
from relax_hpc.queue.storage.shard import ShardError, check_name, pack, unpack
from relax_hpc.queue.storage.shard_files import ShardFiles

Descriptor = dict[str, Any]
_Parsed = TypeVar("_Parsed")
_READ_S = 10.0
"""Time limit of a read on a plane in memory. The file is the last resort."""
FILE = "file"
"""Name of the plane that always exists: files."""


class PlaneCounts:
    """Shards and bytes by plane. A plane with several paths has one entry for each: `rdma_verbs`.

    >>> counts = PlaneCounts()
    >>> counts.count({"name": "rollout-i000001-7-ab-000001.shard", "bytes": 4096}, "shm", "shm", ())
    >>> counts.shards, counts.take_metrics()
    (Counter({'shm': 1}), {'queue/by_shm_shards': 1.0, 'queue/by_shm_bytes': 4096.0})
    """

    def __init__(self) -> None:
        self.shards: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()
        self._reported: dict[str, float] = {}

    def count(
        self, descriptor: Mapping[str, Any], plane: str, path: str, reasons: Sequence[str]
    ) -> None:
        """Count a shard that came by ``plane`` on ``path`` (`Plane.path`); ``reasons``: why better
        planes were not used."""
        kind = path.partition(" ")[0]
        name = plane if kind == plane else f"{plane}_{kind}"
        self.shards[name] += 1
        self.bytes[name] += descriptor.get("bytes", 0)
        # The last part of a shard's name is its number; the part before names the producer.
        producer = descriptor["name"].rpartition("-")[0]
        if (producer, name) not in self._logged:
            self._logged.add((producer, name))
            reason = f", for {'; '.join(reasons)}" if reasons else ""
            print(
                f"queue: shards of {producer} come by {name}{reason}", file=sys.stderr, flush=True
            )

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, as metrics."""
        # A copy of the items, because another thread may count at the same time.
        now = {f"queue/by_{name}_shards": float(count) for name, count in list(self.shards.items())}
        now |= {f"queue/by_{name}_bytes": float(count) for name, count in list(self.bytes.items())}
        new = {tag: value - self._reported.get(tag, 0.0) for tag, value in now.items()}
        self._reported = now
        return {tag: value for tag, value in new.items() if value}


class ShardReader:
    """Reads shards by the best plane that both sides have, and from the file if all planes fail.
    Shards stay mapped until `forget`."""

    def __init__(self, files: ShardFiles, planes: Sequence[Plane] = ()) -> None:
        self.files, self.planes = files, planes
        self.plane_counts = PlaneCounts()
        self._open: dict[str, dict[str, Row]] = {}

    def read(self, descriptor: Descriptor) -> dict[str, Row]:
        """Rows of a shard by row id, as views. ShardError: no plane and no file has it."""
        name = check_name(descriptor["name"])
        if name not in self._open:
            reasons: list[str] = []
            rows = self._from_memory(name, descriptor, unpack, reasons)
            self._open[name] = self._from_file(descriptor, reasons) if rows is None else rows
        return self._open[name]

    def columns(self, descriptor: Descriptor, buffer: memoryview | None = None) -> Columns | None:
        """A shard by field, as views; of ``buffer``, if the whole shard fits into it. None: no
        plane in memory has the shard."""

        def parse(record: memoryview, name: str) -> Columns:
            if buffer is not None and len(record) <= len(buffer):
                # One copy bypasses the cache. Several large copies go through it and take half as
                # long again.
                buffer[: len(record)] = record
                record = buffer[: len(record)]
            return parse_columns(record, name)

        return self._from_memory(check_name(descriptor["name"]), descriptor, parse, [])

    def _from_memory(
        self,
        name: str,
        descriptor: Descriptor,
        parse: Callable[[memoryview, str], _Parsed],
        reasons: list[str],
    ) -> _Parsed | None:
        """Shard parsed from the first plane that delivers it, or None. Errors of the others are
        added to ``reasons``."""
        offers = descriptor.get("planes")
        if not isinstance(offers, dict):
            return None
        for plane in self.planes:
            offer = offers.get(plane.name)
            if not isinstance(offer, dict):
                continue
            try:
                parsed = parse(plane.read(offer, _READ_S), f"{plane.name}:{name}")
            except (PlaneError, ShardError) as error:
                reasons.append(str(error))
                continue
            self.plane_counts.count(descriptor, plane.name, plane.path(offer), reasons)
            return parsed
        return None

    def _from_file(self, descriptor: Descriptor, reasons: list[str]) -> dict[str, Row]:
        rows = self.files.read(descriptor)
        self.plane_counts.count(descriptor, FILE, FILE, reasons)
        return rows

    def forget(self, keep: set[str]) -> None:
        """Drop all shards that are not in ``keep``."""
        self._open = {name: rows for name, rows in self._open.items() if name in keep}
        self.files.forget(keep)

    def close(self) -> None:
        for plane in self.planes:
            plane.close()


class ShardStore(ShardReader):
    """Reader that also makes shards: others can read them immediately, and `save` writes their
    files.

    Another thread calls ``on_saved(names)`` after it has written files. If more than ``max_bytes``
    of memory are taken, `make` writes a new shard to disk only, before it returns.
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
        """Error after which no more files are written. A full disk is not such an error: the thread
        waits for space."""
        self._held: dict[str, Slab] = {}
        self._unwritten: dict[str, memoryview] = {}
        self._to_write: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._save, name="shards", daemon=True)
        self._thread.start()

    def make(
        self, name: str, rows: Sequence[Row], fields: Sequence[str], origin: Mapping[str, Any]
    ) -> tuple[Descriptor, bool]:
        """Pack rows into a shard; its descriptor, and whether it is already saved. BadRow: a row is
        invalid."""
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
        """Write the file of a shard soon, in another thread."""
        self._to_write.put(name)

    def holds(self) -> list[str]:
        """Names of the shards in memory that are on disk too."""
        with self._lock:
            return [name for name in self._held if name not in self._unwritten]

    def discard(self, name: str) -> None:
        """Free a shard that is not saved because the queue refused all of its rows."""
        with self._lock:
            self._unwritten.pop(name, None)
        self.free([name])

    def free(self, names: Sequence[str]) -> None:
        """Free the memory of shards that no process needs in memory."""
        for name in names:
            with self._lock:
                slab = self._held.pop(name, None)
            if slab:
                for plane in self.planes:
                    plane.retire(name)
                self.pool.give_back(slab)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all shards passed to `save` are written; whether they are."""
        with self._lock:
            done = self._lock.wait_for(lambda: self.failure or not self._unwritten, timeout_s)
            return bool(done) and not self.failure

    def _save(self) -> None:
        """Write the files of all waiting shards at a time, and report them, until `close`."""
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
        """Wait for a name; all names that are waiting then. Empty: the store is closed."""
        names = [self._to_write.get()]
        with contextlib.suppress(queue.Empty):
            while names[-1] is not None:
                names.append(self._to_write.get_nowait())
        if names[-1] is None:
            # The end mark stays for the next call, which then has nothing to write.
            self._to_write.put(None)
        return [name for name in names if name is not None]

    def close(self) -> None:
        """Write the waiting shards, unless the disk is full, and free all memory."""
        self._closing.set()
        self._to_write.put(None)
        self._thread.join()
        super().close()
        self.free(list(self._held))
        self.pool.close()


def open_planes(run: RunDir, config: Config, group: str, owner: str, pool: SlabPool) -> list[Plane]:
    """The planes in memory by which process ``owner`` of ``group`` offers and reads, the best
    first.

    ConfigError: a required plane is not available.
    """
    modes = planes_wanted(config)
    # After this time a silent producer's group counts as dead, so a longer wait is useless.
    silence_s = config.liveness.lease_s
    planes, absent = make_planes(
        modes, run.token(), pool, own_address(config, group), owner, silence_s
    )
    for name, reason in absent.items():
        if modes[name] == "required":
            raise ConfigError(missing_plane(name, reason))
        print(f"queue: no plane {name} here: {reason}", file=sys.stderr, flush=True)
    return list(planes.values())


def shard_files(run: RunDir, config: Config) -> ShardFiles:
    """The files of the shards of a run, with the durability of its configuration."""
    return ShardFiles(run.shards, durable=config.queue.durability == "commit")
