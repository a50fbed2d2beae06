"""Endpoints of servers that a group starts for other groups, with the keys to them.

They are files in the group's rendezvous folder. Each process of the group publishes the endpoints
of its servers once they accept requests. Readers use those of the newest incarnation that has
published any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.rundir import is_map, read_map, write_json

_FILE = re.compile(r"inc-(\d{6})-servers-\d+\.json")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of a group."""

    url: str
    """Address at which it listens, tcp://host:port."""
    key: str
    """Secret of this start of the server. Both ends of a connection prove that they hold it."""


def publish_endpoints(
    folder: Path, incarnation: int, rank: int, endpoints: Sequence[Endpoint]
) -> None:
    """Publish the endpoints of one process of an incarnation, readable for this user only."""
    path = folder / f"inc-{incarnation:06d}-servers-{rank}.json"
    value = {"endpoints": [asdict(endpoint) for endpoint in endpoints]}
    retry_write(path, lambda: write_json(path, value))


def read_endpoints(folder: Path) -> list[Endpoint]:
    """Endpoints of the newest incarnation that has published any; empty: none has.

    Files and entries in another format are left out.
    """
    paths: dict[int, list[Path]] = {}
    try:
        for path in sorted(folder.iterdir()):
            if match := _FILE.fullmatch(path.name):
                paths.setdefault(int(match[1]), []).append(path)
    except OSError:
        return []
    endpoints: list[Endpoint] = []
    for path in paths[max(paths)] if paths else ():
        for entry in read_map(path, endpoints=list).get("endpoints", []):
            if is_map(entry, url=str, key=str):
                endpoints.append(Endpoint(entry["url"], entry["key"]))
    return endpoints
