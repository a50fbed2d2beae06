"""How a reader gets the bytes of a version: from the actor's memory by the best plane, each chunk verified."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from relax_hpc.transfer_queue.planes import Plane, PlaneError
from relax_hpc.weights.manifest import Chunk, Manifest, WeightsError, checksum
from relax_hpc.weights.tensors import SafetensorsFile

_AT_ONCE = 2
"""Chunks in flight: while one is verified and copied, the next one is on its way."""


class Puller:
    """Reads chunks; `bytes` counts by plane what came by it."""

    def __init__(self, planes: Sequence[Plane], timeout_s: float) -> None:
        """``timeout_s``: for one chunk."""
        self.planes, self.timeout_s = planes, timeout_s
        self.bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def pull(self, chunks: Iterable[Chunk], version: str, into: SafetensorsFile) -> None:
        """Put ``chunks`` of ``version`` into a file. WeightsError: one of them is not to be had from memory."""
        with ThreadPoolExecutor(_AT_ONCE, "weights") as pool:
            for work in [pool.submit(self._put, chunk, version, into) for chunk in chunks]:
                work.result()

    def _put(self, chunk: Chunk, version: str, into: SafetensorsFile) -> None:
        why_not: list[str] = []
        for plane in self.planes:
            if plane.name in chunk.planes:
                try:
                    record = plane.read(chunk.planes[plane.name], self.timeout_s)
                    if checksum(record) != chunk.digest:
                        raise PlaneError(f"{plane.name}: {chunk.name} was overwritten, or damaged on its way")
                    for part in chunk.parts:
                        into.put(part, record)
                    # What is mapped may have been written anew meanwhile: by then it is offered no more.
                    if not plane.offers_still(chunk.planes[plane.name]):
                        raise PlaneError(f"{plane.name}: {chunk.name} was overwritten while it was read")
                except PlaneError as error:
                    why_not.append(str(error))
                    continue
                with self._lock:
                    self.bytes[plane.name] += chunk.bytes
                return
        raise WeightsError(f"version {version}: {'; '.join(why_not) or 'no plane in common with its maker'}")


def pull_all(manifest: Manifest, puller: Puller, into: SafetensorsFile) -> None:
    """All of a version."""
    puller.pull(manifest.chunks, manifest.version, into)
