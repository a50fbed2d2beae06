"""Pull of a version from the actor's memory, by the best plane. Each record is verified."""

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

# Chunks in flight: while one is verified and copied, the next one is read.
_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class ReadMethod:
    """One method to read a chunk into a file."""

    name: str
    """Key of the counters."""
    bytes: int
    """Bytes that it reads."""
    read: Callable[[], None]
    """Function that reads, verifies and stores the chunk."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """Whole version in the memory of this node, to which deltas refer."""

    version: str
    file: SafetensorsFile


class Puller:
    """Reads chunks. `bytes` counts the bytes by method: a plane, deltas of a plane, or a relay."""

    def __init__(self, planes: Sequence[Plane], timeout_s: float) -> None:
        """``timeout_s``: limit for one record."""
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
        on_chunk: Callable[[Chunk], object] = lambda _: None,
    ) -> None:
        """Read ``chunks`` of a version into a file. Threads call ``on_chunk`` with each complete
        chunk.

        ``sources``: other nodes that have the version. WeightsError: a chunk cannot be read from
        memory.
        """
        usable = anchor if anchor is not None and anchor.version == manifest.anchor else None
        # After a failure no further chunks are requested: if a node has vanished, each request
        # would wait for its timeout.
        failed = threading.Event()

        def read(chunk: Chunk) -> None:
            try:
                if not failed.is_set():
                    methods = self._read_methods(chunk, into, usable, sources)
                    self._try_methods(manifest.version, methods)
                    on_chunk(chunk)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(_IN_FLIGHT, "weights") as pool:
            for work in [pool.submit(read, chunk) for chunk in chunks]:
                work.result()

    def _try_methods(self, version: str, methods: Iterable[ReadMethod]) -> None:
        """Read a chunk of ``version`` by the first of ``methods`` that succeeds."""
        errors: list[str] = []
        for method in methods:
            try:
                method.read()
            except (PlaneError, ValueError) as error:
                errors.append(str(error))
                continue
            with self._lock:
                self.bytes[method.name] += method.bytes
            return
        raise WeightsError(
            f"version {version}: {'; '.join(errors) or 'no plane in common with the actor'}"
        )

    def _read_methods(
        self,
        chunk: Chunk,
        into: SafetensorsFile,
        anchor: Anchor | None,
        sources: VersionSources | None,
    ) -> Iterator[ReadMethod]:
        """Methods to read a chunk, the best first."""
        for plane in self.planes:
            # Shared memory needs no deltas: the whole chunk is mapped at no cost.
            delta_planes = chunk.delta.planes if chunk.delta else {}
            if anchor and chunk.delta and plane.name != "shm" and plane.name in delta_planes:
                read = partial(self._read_delta, plane, chunk, chunk.delta, into, anchor)
                yield ReadMethod(f"{plane.name}_delta", chunk.delta.bytes, read)
            if sources and isinstance(plane, TcpPlane):
                read = partial(self._read_relayed, plane, chunk, into, sources)
                yield ReadMethod(RELAY, chunk.bytes, read)
            if plane.name in chunk.planes:
                read = partial(self._read_chunk, plane, chunk, into)
                yield ReadMethod(plane.name, chunk.bytes, read)

    def _read_relayed(
        self, plane: TcpPlane, chunk: Chunk, into: SafetensorsFile, sources: VersionSources
    ) -> None:
        verify = partial(_verify, chunk, RELAY)
        record = sources.read(plane, chunk, self.timeout_s, verify)
        for part in chunk.parts:
            into.put(part, record)

    def _read_chunk(self, plane: Plane, chunk: Chunk, into: SafetensorsFile) -> None:
        record = self._read(plane, chunk)
        for part in chunk.parts:
            into.put(part, record)
        # The actor may have overwritten a mapped record after its verification. It withdraws the
        # offer before it overwrites the record.
        if not plane.is_still_offered(chunk.planes[plane.name]):
            raise PlaneError(f"{plane.name}: {chunk.name} was overwritten while it was read")

    def _read_delta(
        self,
        plane: Plane,
        chunk: Chunk,
        record_delta: delta.Delta,
        into: SafetensorsFile,
        anchor: Anchor,
    ) -> None:
        """Compute the chunk from that of the anchor and ``record_delta``."""
        difference = self._read(plane, record_delta)
        record = bytearray(chunk.bytes)
        for part in chunk.parts:
            anchor.file.get(part, memoryview(record))
        delta.apply(record, difference)
        if checksum(record) != chunk.digest:
            raise PlaneError(
                f"{plane.name}: {chunk.name} does not follow from the anchor and its delta"
            )
        for part in chunk.parts:
            into.put(part, memoryview(record))

    def _read(self, plane: Plane, record: Chunk | delta.Delta) -> memoryview:
        data = plane.read(record.planes[plane.name], self.timeout_s)
        _verify(record, plane.name, data)
        return data


def _verify(record: Chunk | delta.Delta, method: str, data: memoryview) -> None:
    if checksum(data) != record.digest:
        raise PlaneError(f"{method}: {record.name} was overwritten, or damaged during transfer")
