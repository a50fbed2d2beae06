"""A service that rewards ask over HTTP: JSON there and back, asked again while it is busy or
away."""

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
"""Seconds before a request is sent again; each time twice as long."""
SHOWN = 300
"""Characters of an answer that an error shows."""
MAX_ANSWER_BYTES = 4 << 20
"""Bytes of an answer, after decompression. As JSON it takes up to twenty times as many in
memory."""
_AGAIN = {408, 425, 429}
"""Statuses by which a service asks for patience, beside 5xx."""
_PIECE_BYTES = 1 << 16
_AUTHORIZATION, _BEARER = "Authorization", "Bearer "
"""Header of the token, and the prefix of its value."""
_COMPRESSED = {
    "gzip": zlib.MAX_WBITS | 16,
    "x-gzip": zlib.MAX_WBITS | 16,
    "deflate": zlib.MAX_WBITS,
}
"""Encodings of answers that are read, though none was asked for, and zlib's name for each."""


class NoAnswer(Exception):
    """Error of a service that has not answered, however often it was asked."""


class Away(NoAnswer):
    """Error of a service of a group that is not there: its supervisor starts it again."""

    reason = "reward_away"


class Service:
    """Any number of requests at a time, for one event loop."""

    def __init__(self, settings: ServiceSettings, key: str) -> None:
        """``key``: of the settings. ConfigError: there is no address, or no token where the
        settings say."""
        self._settings = settings
        self._headers = self._prepare(key)
        self._session: aiohttp.ClientSession | None = None
        self._late = f"no answer within {settings.timeout_s:g} s"

    async def ask(self, body: dict[str, Any]) -> Any:
        """The answer to ``body``. NoAnswer. ValueError: the service refuses, or answers no JSON, or
        too much."""
        for attempt in range(self._settings.retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            status, answer = await self._post(body)
            if status == 200:
                return answer
            if status and status < 500 and status not in _AGAIN:
                raise ValueError(f"the service refuses: {status} {self.quote(answer)}")
        raise NoAnswer(
            f"asked {attempt + 1} times, the last time: {status or ''} {self.quote(answer)}"
        )

    def quote(self, answer: Any, from_end: bool = False) -> str:
        """Beginning of an answer, or its end, for an error, see `shown`; without the token, which
        some services repeat when they refuse it."""
        text = str(answer)
        if token := self._headers.get(_AUTHORIZATION, "").removeprefix(_BEARER):
            text = text.replace(token, "***")
        return shown(text[-SHOWN:] if from_end else text)

    async def close(self) -> None:
        """Give its connections back."""
        if self._session:
            await self._session.close()

    def _prepare(self, key: str) -> dict[str, str]:
        """Headers of all requests; ConfigError as of `__init__`."""
        if not self._settings.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{key}.url: found {self._settings.url!r}, allowed: http://... or https://..."
            )
        return _authorization(self._settings.token_file, key)

    async def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer, of JSON if the status is 200; 0 and why there is none."""
        import aiohttp

        if self._session is None:
            limit = aiohttp.ClientTimeout(total=self._settings.timeout_s)
            # Its own limit of connections would be another one beside ours.
            connector = aiohttp.TCPConnector(limit=0)
            # aiohttp 3.14 unpacks what a service has compressed without a bound.
            self._session = aiohttp.ClientSession(
                timeout=limit, connector=connector, auto_decompress=False
            )
        headers = {"Accept-Encoding": "identity", **self._headers}
        try:
            async with self._session.post(
                self._settings.url, json=body, headers=headers, allow_redirects=False
            ) as reply:
                content = await read_answer(reply)
                return reply.status, parse_json(content) if reply.status == 200 else content.decode(
                    errors="replace"
                )
        except TimeoutError:
            return 0, self._late
        except aiohttp.ClientError as error:
            return 0, f"{type(error).__name__}: {error}"


async def read_answer(reply: aiohttp.ClientResponse, most_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Content of an answer, decompressed, of a session with `auto_decompress=False`.

    ValueError: it has more than ``most_bytes``, or is compressed in a way that nothing here reads.
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
            content += unpack.decompress(piece, most_bytes + 1 - len(content)) if unpack else piece
        except zlib.error as error:
            raise ValueError(f"the service answers no {encoding}: {error}") from error
        if len(content) > most_bytes:
            reply.close()
            raise ValueError(
                f"the service answers more than {most_bytes} bytes, allowed: at most that"
            )
    return bytes(content)


def shown(answer: Any) -> str:
    """Beginning of an answer for an error, neutralised: it may be written to a log."""
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
