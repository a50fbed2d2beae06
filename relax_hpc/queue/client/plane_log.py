"""Ways by which shards came to this process: logged at the first shard from each maker, and counted
for the metrics."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

FILE = "file"
"""Way that is always there."""


class Ways:
    """Counts shards and bytes by way: a plane's name, with how its bytes come where that differs:
    `rdma_verbs`.

    >>> ways = Ways()
    >>> ways.count({"name": "rollout-i000001-7-ab-000001.shard", "bytes": 4096}, "shm", "shm", ())
    >>> ways.shards, ways.since_last()
    (Counter({'shm': 1}), {'queue/by_shm_shards': 1.0, 'queue/by_shm_bytes': 4096.0})
    """

    def __init__(self) -> None:
        self.shards: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()
        self._reported: dict[str, float] = {}

    def count(
        self, descriptor: Mapping[str, Any], plane: str, path: str, why_not: Sequence[str]
    ) -> None:
        """A shard came by ``plane``, on it by ``path`` (`Plane.path`), and not by better ones as
        ``why_not`` says."""
        kind = path.partition(" ")[0]
        way = plane if kind == plane else f"{plane}_{kind}"
        self.shards[way] += 1
        self.bytes[way] += descriptor.get("bytes", 0)
        # The last part of a shard's name is its number.
        pair = descriptor["name"].rpartition("-")[0], way
        if pair not in self._told:
            self._told.add(pair)
            reason = f", for {'; '.join(why_not)}" if why_not else ""
            print(f"queue: shards of {pair[0]} come by {way}{reason}", file=sys.stderr, flush=True)

    def since_last(self) -> dict[str, float]:
        """Counts since this was last asked, as metrics."""
        # Another thread may count meanwhile.
        now = {f"queue/by_{way}_shards": float(count) for way, count in list(self.shards.items())}
        now |= {f"queue/by_{way}_bytes": float(count) for way, count in list(self.bytes.items())}
        new = {tag: value - self._reported.get(tag, 0.0) for tag, value in now.items()}
        self._reported = now
        return {tag: value for tag, value in new.items() if value}
