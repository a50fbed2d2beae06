"""A service of a group that has no fixed address: its servers say where they are in the group's rendezvous folder."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.rendezvous.endpoints import Endpoint, endpoints_of
from relax_hpc.rewards.service import Away, Service

if TYPE_CHECKING:
    from relax_hpc.reward_settings import ServiceSettings

_LOOK_S = 5.0
"""Seconds after which others than those that are known may be there."""
_OF_ANOTHER = 401
"""Status by which a server says that its key is another one: a stranger's, at the address of one that has ended."""


class GroupService(Service):
    """Asks the servers of the group, each time the one with the fewest questions; `Away` as soon as one is gone."""

    def __init__(self, settings: ServiceSettings, folder: Path, path: str) -> None:
        """``folder`` has the endpoints; ``path``: of the address, behind that of a server."""
        super().__init__(settings, "")
        self._folder, self._path = folder, path
        self._known: list[Endpoint] = []
        self._looked = 0.0
        self._asked: Counter[str] = Counter()

    def _prepare(self, key: str) -> dict[str, str]:
        return {}

    async def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        import aiohttp

        server = self._server()
        self._asked[server.url] += 1
        try:
            status, found = await self._exchange(
                server.url + self._path, body, {"Authorization": f"Bearer {server.key}"}
            )
        except aiohttp.ClientError as error:
            raise self._away(f"{server.url}: {type(error).__name__}: {error}") from error
        finally:
            self._asked[server.url] -= 1
        if status == _OF_ANOTHER:
            raise self._away(f"{server.url} is somebody else's")
        return status, found

    def _server(self) -> Endpoint:
        if not self._known or time.monotonic() - self._looked > _LOOK_S:
            self._known, self._looked = endpoints_of(self._folder), time.monotonic()
        if not self._known:
            raise Away(f"no server has said in {self._folder} where it is")
        return min(self._known, key=lambda server: self._asked[server.url])

    def _away(self, why: str) -> Away:
        # Others may be there by now.
        self._known = []
        return Away(why)
