"""Limits of an HTTP server: time and size of a request, and connections without a valid bearer."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from aiohttp import web

from relax_hpc.net.transport.proof import MAX_UNPROVEN, PROOF_S

BODY_S = 30.0
"""Seconds for the body of a request to arrive."""
IDLE_S = 75.0
"""Seconds for which a connection without a request stays open."""


class TooLargeError(ValueError):
    """The body of a request is larger than allowed."""


class HttpLimits:
    """Limits of one server, and counts of what it has refused; for one event loop."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        """Refused requests and connections, by reason."""
        self._unproven: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        """Connections that have not sent a valid bearer yet, oldest first."""

    def add_connection(self, protocol: web.RequestHandler) -> web.RequestHandler:
        """Let a new connection send a valid bearer within `PROOF_S`. Returns ``protocol``."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(PROOF_S, self._abort, protocol, "silent")
        self._unproven[protocol] = timer
        if len(self._unproven) > MAX_UNPROVEN:
            self._abort(next(iter(self._unproven)), "crowded")
        return protocol

    def prove(self, protocol: asyncio.BaseProtocol | None) -> None:
        """Note that a connection has sent a valid bearer."""
        timer = self._unproven.pop(protocol, None) if protocol is not None else None
        if timer:
            timer.cancel()

    def _abort(self, protocol: asyncio.BaseProtocol, reason: str) -> None:
        timer = self._unproven.pop(protocol, None)
        if timer is None:
            return
        timer.cancel()
        # aiohttp closes a connection without a request only after its keep-alive time, and one
        # whose header is incomplete never (aiohttp 3.14).
        transport = getattr(protocol, "transport", None)
        if transport is not None:
            self.refused[reason] += 1
            transport.abort()

    def malformed_logger(self, name: str) -> logging.Logger:
        """Logger for aiohttp that counts malformed requests and prints nothing, because the text of
        a record may contain a bearer."""

        def count(record: logging.LogRecord) -> bool:
            if record.levelno >= logging.ERROR:
                self.refused["malformed"] += 1
            return False

        logger = logging.Logger(name)
        logger.addFilter(count)
        return logger


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Body of a request. TooLargeError: it has more than ``max_bytes`` bytes. TimeoutError: it has
    not come within `BODY_S`. web.RequestPayloadError: it is not encoded as its headers say."""
    if (request.content_length or 0) > max_bytes:
        raise TooLargeError
    body = bytearray()
    async with asyncio.timeout(BODY_S):
        # A client may send more bytes than its Content-Length, or none of them.
        async for data in request.content.iter_any():
            body += data
            if len(body) > max_bytes:
                raise TooLargeError
    return bytes(body)


def read_bearer(request: web.BaseRequest) -> str:
    """The bearer token of a request; empty: it has none."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else ""
