"""Addresses of the gateway of a run: a file for each incarnation of the hub, of which the newest is
valid."""

from __future__ import annotations

import re
import socket
from dataclasses import asdict, dataclass

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.rundir import RunDir, read_map, write_json

_FILE = re.compile(r"inc-(\d{6})-gateway\.json")


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Addresses of a gateway. The names of the fields are keys of its file."""

    incarnation: int
    """Incarnation of the hub."""
    host: str
    """Name of its node."""
    url: str
    """Address of its endpoint, for programs of that node."""
    endpoint: str
    """Address for the connections of rollout processes and forwarders."""

    @property
    def is_local(self) -> bool:
        """Whether programs of this node can use its endpoint."""
        return self.host == socket.gethostname()


def purpose_of(incarnation: int) -> bytes:
    """Purpose of connections to the gateway of a hub's incarnation, see `transport.proof`."""
    return b"gateway %d" % incarnation


def publish_address(run: RunDir, address: GatewayAddress) -> None:
    """Write the address of a gateway for other groups."""
    path = run.rendezvous("hub") / f"inc-{address.incarnation:06d}-gateway.json"
    retry_write(path, lambda: write_json(path, asdict(address)))


def newest_address(run: RunDir) -> GatewayAddress | None:
    """Address of the newest gateway; None: no gateway has published one."""
    try:
        paths = sorted(
            path for path in run.rendezvous("hub").iterdir() if _FILE.fullmatch(path.name)
        )
    except OSError:
        return None
    for path in reversed(paths):
        values = read_map(path, incarnation=int, host=str, url=str, endpoint=str)
        if values:
            return GatewayAddress(**values)
    return None
