"""Endpoints of the servers that a group starts for others: files in its rendezvous folder, with the
keys to them.

Each process of the group publishes those of its own, once they serve. Readers take those of the
newest incarnation that has published any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.rundir import read_map, write_json

_FILE = re.compile(r"inc-(\d{6})-servers-\d+\.json")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of a group."""

    url: str
    """Address at which it listens, tcp://host:port."""
    key: str
    """Secret of this start of the server alone, which both ends of a connection prove that they
    hold."""


def publish_endpoints(
    folder: Path, incarnation: int, rank: int, endpoints: Sequence[Endpoint]
) -> None:
    """Publish the endpoints of one process of an incarnation, for this user alone."""
    path = folder / f"inc-{incarnation:06d}-servers-{rank}.json"
    value = {"endpoints": [asdict(endpoint) for endpoint in endpoints]}
    retry_write(path, lambda: write_json(path, value))


def read_endpoints(folder: Path) -> list[Endpoint]:
    """Endpoints of the newest incarnation; none, if none has published any. What is not as
    `publish_endpoints` writes it is left out."""
    try:
        found = [
            (int(match[1]), path)
            for path in folder.iterdir()
            if (match := _FILE.fullmatch(path.name))
        ]
    except OSError:
        return []
    newest = max((number for number, _ in found), default=0)
    values = [
        read_map(path, endpoints=list).get("endpoints", [])
        for number, path in sorted(found)
        if number == newest
    ]
    return [
        Endpoint(one["url"], one["key"])
        for value in values
        for one in value
        if isinstance(one, dict)
        and isinstance(one.get("url"), str)
        and isinstance(one.get("key"), str)
    ]
