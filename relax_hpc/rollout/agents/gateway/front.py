"""The HTTP side: who shows the bearer of a session may post requests of bounded size to it, others
nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from relax_hpc.net.rendezvous.network import LOOPBACK
from relax_hpc.net.transport.proof import MAX_UNPROVEN, PROOF_S

MOST_BYTES = 4 << 20
"""Bytes of a request's body at most."""
_BODY_S = 30.0
"""Seconds for the body of a request to come."""
_IDLE_S = 75.0
"""Seconds for which a connection without a request is kept."""
_MOST_DIGITS = 6
"""Digits of a count of retries; a larger one is no count."""
JSON = "application/json"
MESSAGES = "/v1/messages"
"""Path of Anthropic's interface, and beginning of those that belong to it."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
"""Types of Anthropic's errors by HTTP status (docs.anthropic.com/en/api/errors)."""


def key_of(bearer: str) -> str:
    """Digest of a bearer, by which its session is known; it opens nothing.

    >>> key_of("sk-x")[:8]
    '9df37f5e'
    """
    # aiohttp reads bytes of a header that are no UTF-8 as surrogates.
    return hashlib.sha256(bearer.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of an agent program."""

    key: str
    """Digest of its bearer."""
    path: str
    body: bytes = field(repr=False)
    repeats: int | None = None
    """Times that its client has sent it before; None: the client does not say."""
    idempotency: str = ""
    """Digest of its idempotency key, which requests have in common that are one; empty: it has
    none."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to an agent program."""

    status: int
    body: bytes = field(repr=False)
    content_type: str = JSON

    @classmethod
    def error(cls, status: int, code: str, detail: str, path: str = "") -> Reply:
        """Error as the clients of a ``path`` read it: Anthropic's, or else OpenAI's. Both have the
        ``code``."""
        if path.startswith(MESSAGES):
            error = {
                "type": _ANTHROPIC_TYPES.get(status, "invalid_request_error"),
                "message": detail,
                "code": code,
            }
            return cls(status, json.dumps({"type": "error", "error": error}).encode())
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": detail, "type": kind, "param": None, "code": code}
        return cls(status, json.dumps({"error": error}).encode())

    @classmethod
    def unknown_bearer(cls, path: str) -> Reply:
        """Answer to a request that has no session."""
        return cls.error(401, "unknown_bearer", "no session has this bearer, or it has ended", path)


class Front:
    """Server on the loopback address; for one event loop."""

    def __init__(
        self, knows: Callable[[str], Awaitable[bool]], ask: Callable[[Asked], Awaitable[Reply]]
    ) -> None:
        """``knows`` the digest of a bearer, before more is read of its request; ``ask`` gives the
        answer."""
        self._knows, self._ask = knows, ask
        self.refused: Counter[str] = Counter()
        """Requests, and connections, that came to nothing, by reason."""
        self.url = ""
        self._strangers: dict[web.RequestHandler, None] = {}
        """Connections that have shown no bearer yet, oldest first."""

    async def start(self) -> None:
        """Listen at a port of its own."""
        loop = asyncio.get_running_loop()
        self._server = web.Server(
            self._answered,
            # A client that hangs up takes its request back.
            handler_cancellation=True,
            keepalive_timeout=_IDLE_S,
            access_log=None,
            logger=self._malformed_logger(),
        )
        listening = socket.create_server((LOOPBACK, 0))
        self._listener = await loop.create_server(self._connected, sock=listening)
        self.url = f"http://{LOOPBACK}:{listening.getsockname()[1]}"

    async def close(self) -> None:
        self._listener.close()
        await self._server.shutdown(1.0)

    def _malformed_logger(self) -> logging.Logger:
        """Logger of aiohttp that counts its records: malformed requests, whose text may have a
        bearer in it."""

        def count(record: logging.LogRecord) -> bool:
            if record.levelno >= logging.ERROR:
                self.refused["malformed"] += 1
            return False

        logger = logging.Logger(f"{__name__}.requests")
        logger.addFilter(count)
        return logger

    def _connected(self) -> web.RequestHandler:
        """Protocol of a new connection, which has a moment to show a bearer."""
        protocol = self._server()
        self._strangers[protocol] = None
        if len(self._strangers) > MAX_UNPROVEN:
            self._turn_away(next(iter(self._strangers)), "crowded")
        asyncio.get_running_loop().call_later(PROOF_S, self._turn_away, protocol, "silent")
        return protocol

    def _turn_away(self, protocol: web.RequestHandler, reason: str) -> None:
        is_stranger = self._strangers.pop(protocol, protocol) is None
        if is_stranger and protocol.transport is not None:
            self.refused[reason] += 1
            protocol.transport.abort()

    async def _answered(self, request: web.BaseRequest) -> web.Response:
        reply = await self._reply(request)
        # Nothing gets better by asking again at once, and each try would count.
        headers = {} if reply.status == 200 else {"x-should-retry": "false"}
        return web.Response(
            status=reply.status, body=reply.body, content_type=reply.content_type, headers=headers
        )

    async def _reply(self, request: web.BaseRequest) -> Reply:
        key = key_of(_bearer(request))
        if not await self._knows(key):
            self.refused["unknown_bearer"] += 1
            return Reply.unknown_bearer(request.path)
        self._strangers.pop(request.protocol, None)
        if (request.content_length or 0) > MOST_BYTES:
            return self._too_large(request.path)
        try:
            async with asyncio.timeout(_BODY_S):
                body = await _read(request)
        except TimeoutError:
            self.refused["slow"] += 1
            return Reply.error(
                408, "slow", f"the body has not come within {_BODY_S:g} s", request.path
            )
        except web.RequestPayloadError:
            self.refused["malformed"] += 1
            return Reply.error(
                400, "malformed", "the body is not encoded as its headers say", request.path
            )
        if body is None:
            return self._too_large(request.path)
        return await self._ask(
            Asked(key, request.path, body, _repeats(request), _idempotency(request))
        )

    def _too_large(self, path: str) -> Reply:
        self.refused["too_large"] += 1
        return Reply.error(413, "too_large", f"a request may have {MOST_BYTES} bytes", path)


def _bearer(request: web.BaseRequest) -> str:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _repeats(request: web.BaseRequest) -> int | None:
    """Retries as the clients of OpenAI and Anthropic count them; None: the client does not."""
    count = request.headers.get("x-stainless-retry-count")
    if count is None:
        return None
    return int(count) if count.isascii() and count.isdecimal() and len(count) <= _MOST_DIGITS else 0


def _idempotency(request: web.BaseRequest) -> str:
    key = request.headers.get("idempotency-key", "")
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest() if key else ""


async def _read(request: web.BaseRequest) -> bytes | None:
    """Body of a request; None if it is too large, whatever it said before."""
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)
