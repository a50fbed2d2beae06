"""Reward of a service that is asked over HTTP: a judge, a simulator, whatever does not run in a process of ours."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

    from relax_hpc.reward_settings import RewardSettings
    from relax_hpc.rewards import RewardInput

FIRST_PAUSE_S = 0.5
"""Before a request is sent again; each time twice as long."""
_AGAIN = {408, 425, 429}
"""Answers by which a service asks for patience, beside 5xx."""
_SHOWN = 300


class NoAnswer(Exception):
    """The service has not answered, however often it was asked."""


class Remote:
    """Posts prompt groups to `reward.remote.url`, see there; any number at a time."""

    def __init__(self, settings: RewardSettings) -> None:
        """ConfigError: there is no address, or no token where the settings say."""
        self._settings = settings.remote
        self.at_once = self._settings.in_flight
        if not self._settings.url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.remote.url: found {self._settings.url!r}, allowed: http://... or https://...")
        self._headers = _authorization(self._settings.token_file)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, samples: list[RewardInput]) -> list[Any]:
        """What the service gives for a prompt group. NoAnswer. ValueError: it refuses, or gives something else."""
        asked = {"samples": [dataclasses.asdict(sample) for sample in samples]}
        for attempt in range(self._settings.retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            status, found = await self._post(asked)
            if status == 200:
                return _scores(found)
            if status and status < 500 and status not in _AGAIN:
                raise ValueError(f"the service refuses: {status} {str(found)[:_SHOWN]}")
        raise NoAnswer(f"asked {attempt + 1} times, the last time: {status or ''} {str(found)[:_SHOWN]}")

    async def _post(self, asked: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer, an object if the status is 200; 0 and why there is none."""
        import aiohttp

        if self._session is None:
            limit = aiohttp.ClientTimeout(total=self._settings.timeout_s)
            self._session = aiohttp.ClientSession(
                timeout=limit, headers=self._headers, connector=aiohttp.TCPConnector(limit=0)
            )
        try:
            async with self._session.post(self._settings.url, json=asked, allow_redirects=False) as reply:
                text = await reply.text(errors="replace")
                return reply.status, await reply.json(content_type=None) if reply.status == 200 else text
        except TimeoutError:
            return 0, f"no answer within {self._settings.timeout_s:g} s"
        except aiohttp.ClientError as error:
            return 0, f"{type(error).__name__}: {error}"


def _scores(found: Any) -> list[Any]:
    if not isinstance(found, dict) or not isinstance(found.get("scores"), list):
        raise ValueError(f'the service answers {str(found)[:_SHOWN]!r}, expected {{"scores": [...]}}')
    return found["scores"]


def _authorization(token_file: str) -> dict[str, str]:
    if not token_file:
        return {}
    try:
        token = Path(token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward.remote.token_file: {token_file}: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"reward.remote.token_file: {token_file}: found no token, allowed: one line of it")
    return {"Authorization": f"Bearer {token}"}
