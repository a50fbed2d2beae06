"""A service that rewards ask over HTTP: JSON there and back, asked again while it is busy or away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

    from relax_hpc.reward_settings import ServiceSettings

FIRST_PAUSE_S = 0.5
"""Seconds before a request is sent again; each time twice as long."""
SHOWN = 300
"""Characters of an answer that an error shows."""
_AGAIN = {408, 425, 429}
"""Statuses by which a service asks for patience, beside 5xx."""


class NoAnswer(Exception):
    """Error of a service that has not answered, however often it was asked."""


class Away(NoAnswer):
    """Error of a service of a group that is not there: its supervisor starts it again."""

    reason = "reward_away"


class Service:
    """Any number of requests at a time, for one event loop."""

    def __init__(self, settings: ServiceSettings, key: str) -> None:
        """``key``: of the settings. ConfigError: there is no address, or no token where the settings say."""
        self._settings = settings
        self._headers = self._prepare(key)
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, body: dict[str, Any]) -> Any:
        """The answer to ``body``. NoAnswer. ValueError: the service refuses, or answers no JSON."""
        for attempt in range(self._settings.retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            status, found = await self._post(body)
            if status == 200:
                return found
            if status and status < 500 and status not in _AGAIN:
                raise ValueError(f"the service refuses: {status} {str(found)[:SHOWN]}")
        raise NoAnswer(f"asked {attempt + 1} times, the last time: {status or ''} {str(found)[:SHOWN]}")

    async def close(self) -> None:
        """Give its connections back."""
        if self._session:
            await self._session.close()

    def _prepare(self, key: str) -> dict[str, str]:
        """Headers of all requests; ConfigError as of `__init__`."""
        if not self._settings.url.startswith(("http://", "https://")):
            raise ConfigError(f"{key}.url: found {self._settings.url!r}, allowed: http://... or https://...")
        return _authorization(self._settings.token_file, key)

    async def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer, of JSON if the status is 200; 0 and why there is none."""
        import aiohttp

        try:
            return await self._exchange(self._settings.url, body, self._headers)
        except aiohttp.ClientError as error:
            return 0, f"{type(error).__name__}: {error}"

    async def _exchange(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        """The same of a POST to ``url``. aiohttp.ClientError: there is no connection, or not until the end."""
        import aiohttp

        if self._session is None:
            limit = aiohttp.ClientTimeout(total=self._settings.timeout_s)
            # Its own limit of connections would be another one beside ours.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=limit, connector=connector)
        try:
            async with self._session.post(url, json=body, headers=headers, allow_redirects=False) as reply:
                if reply.status == 200:
                    return 200, await reply.json(content_type=None)
                return reply.status, await reply.text(errors="replace")
        except TimeoutError:
            return 0, f"no answer within {self._settings.timeout_s:g} s"


def _authorization(token_file: str, key: str) -> dict[str, str]:
    if not token_file:
        return {}
    try:
        token = Path(token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}.token_file: {token_file}: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{key}.token_file: {token_file}: found no token, allowed: one line of it")
    return {"Authorization": f"Bearer {token}"}
