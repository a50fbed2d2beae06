"""Address and token of the service of a run: one file, readable by the user of the run alone."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.rundir import RunDir, read_map, replace_when_written

_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Address of the service. The names of the fields are keys of its file."""

    incarnation: int
    """Incarnation of the hub."""
    host: str
    """Name of its node."""
    url: str
    token: str = field(repr=False)
    """Bearer token for all requests. It stays the same for the whole run."""


def address_file(run: RunDir) -> Path:
    return run.root / "service" / "api.json"


def read_address(run: RunDir) -> ServiceAddress | None:
    """Address of the newest service of a run; None: none has published one."""
    values = read_map(address_file(run), incarnation=int, host=str, url=str, token=str)
    if not values:
        return None
    return ServiceAddress(**{name: values[name] for name in ServiceAddress.__slots__})


def publish_address(run: RunDir, address: ServiceAddress) -> None:
    """Write the address for commands of this user."""
    path = address_file(run)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    retry_write(path, lambda: _write_private(path, json.dumps(asdict(address), indent=1).encode()))


def _write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file that only this user can read, whatever the umask is."""
    with replace_when_written(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def make_token() -> str:
    return secrets.token_urlsafe(_TOKEN_BYTES)
