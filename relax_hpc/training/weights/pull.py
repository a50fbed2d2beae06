"""Pull of a version's bytes: from the actor's memory by the best plane, each record verified."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from relax_hpc.net.transport import Plane, PlaneError, TcpPlane
from relax_hpc.training.weights import delta
from relax_hpc.training.weights.manifest import Chunk, Manifest, WeightsError, checksum
from relax_hpc.training.weights.relay import NAME as RELAY
from relax_hpc.training.weights.relay import VersionSources
from relax_hpc.training.weights.tensors import SafetensorsFile

_AT_ONCE = 2
"""Chunks in flight: while one is verified and copied, the next one is on its way."""
Way = tuple[str, int, Callable[[], None]]
"""Way to get a record: a name, bytes, and what to do."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """Anchor that this node has already, a whole version."""

    version: str
    file: SafetensorsFile


class Puller:
    """Reads chunks; `bytes` counts by way what came by it: a plane, or the differences that came by
    one."""

    def __init__(self, planes: Sequence[Plane], timeout_s: float) -> None:
        """``timeout_s``: seconds for one record."""
        self.planes, self.timeout_s = planes, timeout_s
        self.bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def pull(
        self,
        manifest: Manifest,
        chunks: Iterable[Chunk],
        into: SafetensorsFile,
        anchor: Anchor | None = None,
        sources: VersionSources | None = None,
        got: Callable[[Chunk], object] = lambda _: None,
    ) -> None:
        """Put ``chunks`` of a version into a file, and tell ``got`` of each, in any thread.
        ``sources``: who else than its maker has them. WeightsError: one of them is not to be had
        from memory."""
        usable = anchor if anchor is not None and anchor.version == manifest.anchor else None
        # After a failure the others are not asked for: of a node that has vanished each would take
        # its time.
        failed = threading.Event()

        def put(chunk: Chunk) -> None:
            try:
                if not failed.is_set():
                    self._put(chunk, manifest.version, self._ways(chunk, into, usable, sources))
                    got(chunk)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(_AT_ONCE, "weights") as pool:
            for work in [pool.submit(put, chunk) for chunk in chunks]:
                work.result()

    def _put(self, chunk: Chunk, version: str, ways: Iterable[Way]) -> None:
        why_not: list[str] = []
        for way, size, act in ways:
            try:
                act()
            except (PlaneError, ValueError) as error:
                why_not.append(str(error))
                continue
            with self._lock:
                self.bytes[way] += size
            return
        raise WeightsError(
            f"version {version}: {'; '.join(why_not) or 'no plane in common with its maker'}"
        )

    def _ways(
        self,
        chunk: Chunk,
        into: SafetensorsFile,
        anchor: Anchor | None,
        sources: VersionSources | None,
    ) -> Iterator[Way]:
        """Ways to get a chunk, the best first. Within a node the whole is there at no cost."""
        for plane in self.planes:
            if anchor and chunk.delta and plane.name != "shm" and plane.name in chunk.delta.planes:
                yield (
                    f"{plane.name}_delta",
                    chunk.delta.bytes,
                    partial(self._renew, plane, chunk, into, anchor),
                )
            if sources and isinstance(plane, TcpPlane):
                yield RELAY, chunk.bytes, partial(self._relayed, plane, chunk, into, sources)
            if plane.name in chunk.planes:
                yield plane.name, chunk.bytes, partial(self._copy, plane, chunk, into)

    def _relayed(
        self, plane: TcpPlane, chunk: Chunk, into: SafetensorsFile, sources: VersionSources
    ) -> None:
        record = sources.read(plane, chunk, self.timeout_s, partial(_check, chunk, RELAY))
        for part in chunk.parts:
            into.put(part, record)

    def _copy(self, plane: Plane, chunk: Chunk, into: SafetensorsFile) -> None:
        record = self._read(plane, chunk)
        for part in chunk.parts:
            into.put(part, record)
        # What is mapped may have been written anew meanwhile: by then it is offered no more.
        if not plane.is_still_offered(chunk.planes[plane.name]):
            raise PlaneError(f"{plane.name}: {chunk.name} was overwritten while it was read")

    def _renew(self, plane: Plane, chunk: Chunk, into: SafetensorsFile, anchor: Anchor) -> None:
        """Make the chunk of the anchor's and what differs."""
        difference = self._read(plane, chunk.delta)
        record = bytearray(chunk.bytes)
        for part in chunk.parts:
            anchor.file.get(part, memoryview(record))
        delta.apply(record, difference)
        if checksum(record) != chunk.digest:
            raise PlaneError(
                f"{plane.name}: {chunk.name} does not come of the anchor and its difference"
            )
        for part in chunk.parts:
            into.put(part, memoryview(record))

    def _read(self, plane: Plane, record: Chunk | delta.Delta) -> memoryview:
        found = plane.read(record.planes[plane.name], self.timeout_s)
        _check(record, plane.name, found)
        return found


def _check(record: Chunk | delta.Delta, way: str, found: memoryview) -> None:
    if checksum(found) != record.digest:
        raise PlaneError(f"{way}: {record.name} was overwritten, or damaged on its way")
