"""Client of a service whose servers are a group of the run. They have no fixed address, and publish
their endpoints in the group's rendezvous folder.

If a server has died, its port may belong to another user's process. So both ends of a connection
first prove that they have the key of the endpoint file (`relax_hpc.net.transport.proof`). The key
itself is never sent.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.base.foreign_files import parse_json
from relax_hpc.net.rendezvous.endpoints import Endpoint, read_endpoints
from relax_hpc.net.transport.calls import CallLink, open_link
from relax_hpc.net.transport.exchange import PeerGone
from relax_hpc.rewards.service import Away, Service

if TYPE_CHECKING:
    from relax_hpc.base.reward_settings import ServiceSettings

PURPOSE = b"judge"
"""Purpose of the connections, see `relax_hpc.net.transport.proof`."""
CONNECT_S = 5.0
"""Seconds for a server to accept a connection and to prove its identity."""
_READ_AGAIN_S = 5.0
"""Seconds after which the endpoints are read again."""
_SCHEME = "tcp://"


class GroupService(Service):
    """Sends each request to the server of the group with the fewest open requests. Raises `Away` if
    that server is gone."""

    def __init__(self, settings: ServiceSettings, folder: Path) -> None:
        """``folder``: contains the endpoints."""
        super().__init__(settings, "")
        self._folder = folder
        self._endpoints: list[Endpoint] = []
        self._read_at = 0.0
        self._open_requests: Counter[str] = Counter()
        self._links: dict[Endpoint, asyncio.Task[CallLink]] = {}

    async def close(self) -> None:
        """See `Service`."""
        for opening in self._links.values():
            if _is_open(opening):
                opening.result().close()
            else:
                opening.cancel()
        await super().close()

    def _prepare(self, key: str) -> dict[str, str]:
        return {}

    async def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        endpoint = self._next_endpoint()
        self._open_requests[endpoint.url] += 1
        try:
            link = await self._link(endpoint)
            async with asyncio.timeout(self._settings.timeout_s):
                answer = await link.call(body=json.dumps(body).encode())
        except PeerGone as gone:
            raise self._away(f"{endpoint.url}: {gone}") from gone
        except TimeoutError:
            return 0, self._timeout_text
        finally:
            self._open_requests[endpoint.url] -= 1
        status, content = answer["status"], answer["body"]
        return status, parse_json(content) if status == 200 else content.decode(errors="replace")

    async def _link(self, endpoint: Endpoint) -> CallLink:
        """An open connection to a server that has proven its identity. Away: it cannot be opened.

        Concurrent requests share one attempt, so that they do not wait for a dead node one after
        the other.
        """
        opening = self._links.get(endpoint)
        if opening is None or (opening.done() and not _is_open(opening)):
            opening = self._links[endpoint] = asyncio.create_task(open_endpoint(endpoint))
        try:
            return await asyncio.shield(opening)
        except OSError as error:
            raise self._away(f"{endpoint.url}: {error}") from error

    def _next_endpoint(self) -> Endpoint:
        if not self._endpoints or time.monotonic() - self._read_at > _READ_AGAIN_S:
            self._endpoints, self._read_at = read_endpoints(self._folder), time.monotonic()
        if not self._endpoints:
            raise Away(f"no server has published an endpoint in {self._folder}")
        return min(self._endpoints, key=lambda endpoint: self._open_requests[endpoint.url])

    def _away(self, cause: str) -> Away:
        # The endpoints are read again for the next request: other servers may have started.
        self._endpoints = []
        return Away(cause)


def _is_open(opening: asyncio.Task[CallLink]) -> bool:
    """Whether a connection was opened and has not ended since."""
    if not opening.done() or opening.cancelled() or opening.exception():
        return False
    return not opening.result().lost.is_set()


async def open_endpoint(endpoint: Endpoint) -> CallLink:
    """A connection to the server of ``endpoint``. OSError: no process there proves that it is that
    server."""
    if not endpoint.url.startswith(_SCHEME):
        raise ConnectionError(
            f"found no {_SCHEME} address: a server of another version, which proves no identity"
        )
    return await open_link(endpoint.url, endpoint.key.encode(), PURPOSE, CONNECT_S)
