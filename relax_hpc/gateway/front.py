"""The HTTP side: who shows the bearer of a session may post requests of bounded size to it, others nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from relax_hpc.rendezvous.network import LOOPBACK
from relax_hpc.transport.proof import MAX_UNPROVEN, PROOF_S

MOST_BYTES = 4 << 20
"""Bytes of a request's body at most."""
_BODY_S = 30.0
"""Seconds for the body of a request to come."""
_IDLE_S = 75.0
"""Seconds for which a connection without a request is kept."""
JSON = "application/json"


def key_of(bearer: str) -> str:
    """Digest of a bearer, by which its session is known; it opens nothing.

    >>> key_of("sk-x")[:8]
    '0e2e0d7f'
    """
    return hashlib.sha256(bearer.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of an agent program."""

    key: str
    """Digest of its bearer."""
    path: str
    body: bytes = field(repr=False)
    repeats: int = 0
    """Times that its client has sent it before, as it says."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to an agent program."""

    status: int
    body: bytes = field(repr=False)
    content_type: str = JSON

    @classmethod
    def error(cls, status: int, code: str, detail: str) -> Reply:
        """Error as OpenAI's clients read it."""
        about = {"message": detail, "type": "invalid_request_error" if status < 500 else "server_error", "code": code}
        return cls(status, json.dumps({"error": about}).encode())


UNKNOWN = Reply.error(401, "unknown_bearer", "no session has this bearer, or it has ended")


class Front:
    """Server on the loopback address; for one event loop."""

    def __init__(self, knows: Callable[[str], Awaitable[bool]], ask: Callable[[Asked], Awaitable[Reply]]) -> None:
        """``knows`` the digest of a bearer, before more is read of its request; ``ask`` gives the answer."""
        self._knows, self._ask = knows, ask
        self.refused: Counter[str] = Counter()
        """Requests, and connections, that came to nothing, by reason."""
        self.url = ""
        self._strangers: dict[web.RequestHandler, None] = {}
        """Connections that have shown no bearer yet, oldest first."""

    async def start(self) -> None:
        """Listen at a port of its own."""
        loop = asyncio.get_running_loop()
        self._server = web.Server(self._answered, keepalive_timeout=_IDLE_S, access_log=None)
        listening = socket.create_server((LOOPBACK, 0))
        self._listener = await loop.create_server(self._connected, sock=listening)
        self.url = f"http://{LOOPBACK}:{listening.getsockname()[1]}"

    async def close(self) -> None:
        self._listener.close()
        await self._server.shutdown(1.0)

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
        return web.Response(status=reply.status, body=reply.body, content_type=reply.content_type, headers=headers)

    async def _reply(self, request: web.BaseRequest) -> Reply:
        key = key_of(_bearer(request))
        if not await self._knows(key):
            self.refused["unknown_bearer"] += 1
            return UNKNOWN
        self._strangers.pop(request.protocol, None)
        if (request.content_length or 0) > MOST_BYTES:
            return self._too_large()
        try:
            async with asyncio.timeout(_BODY_S):
                body = await _read(request)
        except TimeoutError:
            self.refused["slow"] += 1
            return Reply.error(408, "slow", f"the body has not come within {_BODY_S:g} s")
        if body is None:
            return self._too_large()
        repeats = request.headers.get("x-stainless-retry-count", "0")
        return await self._ask(Asked(key, request.path, body, int(repeats) if repeats.isdecimal() else 0))

    def _too_large(self) -> Reply:
        self.refused["too_large"] += 1
        return Reply.error(413, "too_large", f"a request may have {MOST_BYTES} bytes")


def _bearer(request: web.BaseRequest) -> str:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _read(request: web.BaseRequest) -> bytes | None:
    """Body of a request; None if it is too large, whatever it said before."""
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)
