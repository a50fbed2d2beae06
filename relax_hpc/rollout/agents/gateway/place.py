"""Place of the gateway of a run: a file of each incarnation of the hub, of which the newest
counts."""

from __future__ import annotations

import re
import socket
from dataclasses import asdict, dataclass

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.rundir import RunDir, read_map, write_json

_FILE = re.compile(r"inc-(\d{6})-gateway\.json")


@dataclass(frozen=True, slots=True)
class Place:
    """Addresses of a gateway."""

    incarnation: int
    """Incarnation of the hub."""
    host: str
    """Name of its node."""
    url: str
    """Address of its endpoint, for programs of that node."""
    endpoint: str
    """Address at which rollout processes and forwarders connect."""

    @property
    def is_here(self) -> bool:
        """Whether programs of this node reach its endpoint."""
        return self.host == socket.gethostname()


def purpose_of(incarnation: int) -> bytes:
    """Purpose of connections to the gateway of a hub's incarnation, see `transport.proof`."""
    return b"gateway %d" % incarnation


def publish_place(run: RunDir, place: Place) -> None:
    """Tell other groups where the gateway is."""
    path = run.rendezvous("hub") / f"inc-{place.incarnation:06d}-gateway.json"
    retry_write(path, lambda: write_json(path, asdict(place)))


def newest_place(run: RunDir) -> Place | None:
    """Place of the newest gateway; None: none has said where it is."""
    try:
        paths = sorted(
            path for path in run.rendezvous("hub").iterdir() if _FILE.fullmatch(path.name)
        )
    except OSError:
        return None
    values = (
        read_map(path, incarnation=int, host=str, url=str, endpoint=str) for path in reversed(paths)
    )
    return next((Place(**value) for value in values if value), None)
