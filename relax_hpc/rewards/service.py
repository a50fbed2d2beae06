"""Client of an HTTP service for rewards. Requests and responses are JSON. A request is repeated if
the service is busy or does not respond."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import parse_json
from relax_hpc.base.terminal_text import escape_line

if TYPE_CHECKING:
    import aiohttp

    from relax_hpc.base.reward_settings import ServiceSettings

FIRST_PAUSE_S = 0.5
"""Seconds before the first retry of a request. The pause doubles with each retry."""
SHOWN = 300
"""Number of characters of a response in an error message."""
MAX_ANSWER_BYTES = 4 << 20
"""Maximum size of a response after decompression. Parsed JSON takes up to twenty times as much
memory."""
_RETRIED = {408, 425, 429}
"""Statuses for which a request is retried, in addition to 5xx."""
_PIECE_BYTES = 1 << 16
_AUTHORIZATION, _BEARER = "Authorization", "Bearer "
"""Header of the token, and the prefix of its value."""
_COMPRESSED = {
    "gzip": zlib.MAX_WBITS | 16,
    "x-gzip": zlib.MAX_WBITS | 16,
    "deflate": zlib.MAX_WBITS,
}
"""Content-Encoding of responses -> window size for zlib. Requests ask for no compression, but some
services compress anyway."""


class NoAnswer(Exception):
    """A service has not responded in any attempt."""


class Away(NoAnswer):
    """No server of a group of the run is available. The supervisor restarts the group."""

    reason = "reward_away"


class Service:
    """Client for any number of concurrent requests, for one event loop."""

    def __init__(self, settings: ServiceSettings, key: str) -> None:
        """``key``: name of the settings. ConfigError: the address is invalid, or the token cannot
        be read."""
        self._settings = settings
        self._headers = self._prepare(key)
        self._session: aiohttp.ClientSession | None = None
        self._timeout_text = f"no answer within {settings.timeout_s:g} s"

    async def ask(self, body: dict[str, Any]) -> Any:
        """The response to ``body``. NoAnswer. ValueError: the service refuses the request, or its
        response is not JSON, or too large."""
        for attempt in range(self._settings.retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            status, answer = await self._post(body)
            if status == 200:
                return answer
            if status and status < 500 and status not in _RETRIED:
                raise ValueError(f"the service refuses: {status} {self.quote(answer)}")
        raise NoAnswer(
            f"asked {attempt + 1} times, the last time: {status or ''} {self.quote(answer)}"
        )

    def quote(self, answer: Any, from_end: bool = False) -> str:
        """Beginning, or end, of a response for an error message, see `shown`. The token is removed,
        because some services repeat it when they refuse it."""
        text = str(answer)
        token = self._headers.get(_AUTHORIZATION, "").removeprefix(_BEARER)
        if token:
            text = text.replace(token, "***")
        return shown(text[-SHOWN:] if from_end else text)

    async def close(self) -> None:
        """Close all connections."""
        if self._session:
            await self._session.close()

    def _prepare(self, key: str) -> dict[str, str]:
        """Headers of all requests. ConfigError: see `__init__`."""
        if not self._settings.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{key}.url: found {self._settings.url!r}, allowed: http://... or https://..."
            )
        return _authorization(self._settings.token_file, key)

    async def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and response; the response is parsed JSON if the status is 200. Without a
        response: 0 and the reason."""
        import aiohttp

        if self._session is None:
            limit = aiohttp.ClientTimeout(total=self._settings.timeout_s)
            # No limit of connections: the number of requests is limited by the callers.
            connector = aiohttp.TCPConnector(limit=0)
            # aiohttp 3.14 would decompress a response of any size, see `read_answer`.
            self._session = aiohttp.ClientSession(
                timeout=limit, connector=connector, auto_decompress=False
            )
        headers = {"Accept-Encoding": "identity", **self._headers}
        try:
            async with self._session.post(
                self._settings.url, json=body, headers=headers, allow_redirects=False
            ) as reply:
                content = await read_answer(reply)
                if reply.status == 200:
                    return reply.status, parse_json(content)
                return reply.status, content.decode(errors="replace")
        except TimeoutError:
            return 0, self._timeout_text
        except aiohttp.ClientError as error:
            return 0, f"{type(error).__name__}: {error}"


async def read_answer(reply: aiohttp.ClientResponse, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Decompressed content of a response. The session must have `auto_decompress=False`.

    ValueError: the content has more than ``max_bytes``, or an encoding that is not supported.
    """
    encoding = reply.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity", *_COMPRESSED):
        raise ValueError(
            f"the service answers with Content-Encoding {shown(encoding)}, allowed: none, or gzip"
        )
    unpack = zlib.decompressobj(_COMPRESSED[encoding]) if encoding in _COMPRESSED else None
    content = bytearray()
    async for piece in reply.content.iter_chunked(_PIECE_BYTES):
        try:
            content += unpack.decompress(piece, max_bytes + 1 - len(content)) if unpack else piece
        except zlib.error as error:
            raise ValueError(f"the service answers no {encoding}: {error}") from error
        if len(content) > max_bytes:
            reply.close()
            raise ValueError(
                f"the service answers more than {max_bytes} bytes, allowed: at most that"
            )
    return bytes(content)


def shown(answer: Any) -> str:
    """Beginning of a response for an error message. Control characters are escaped, because the
    message may be written to a log or a terminal."""
    return escape_line(str(answer)[:SHOWN])


def _authorization(token_file: str, key: str) -> dict[str, str]:
    if not token_file:
        return {}
    try:
        token = Path(token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}.token_file: {token_file}: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{key}.token_file: {token_file}: found no token, allowed: one line of it"
        )
    return {_AUTHORIZATION: f"{_BEARER}{token}"}
