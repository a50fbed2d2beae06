"""Planes by which shards came to this process: logged at the first shard of each producer, and
counted for the metrics."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

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
