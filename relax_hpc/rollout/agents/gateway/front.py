"""The HTTP side. A client with the bearer of a session may post requests of limited size to it; all
other clients are refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from relax_hpc.net.http_limits import BODY_S, IDLE_S, HttpLimits, TooLargeError, read_body
from relax_hpc.net.rendezvous.network import LOOPBACK

MAX_BYTES = 4 << 20
"""Most bytes of a request's body."""
_MAX_DIGITS = 6
"""Most digits of a retry count. A longer number is not a count."""
JSON = "application/json"
MESSAGES = "/v1/messages"
"""Path of Anthropic's interface, and prefix of the other paths of that interface."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
"""Types of Anthropic's errors by HTTP status (docs.anthropic.com/en/api/errors)."""


def key_of(bearer: str) -> str:
    """Digest of a bearer, which identifies its session. The digest gives no access.

    >>> key_of("sk-x")[:8]
    '9df37f5e'
    """
    # aiohttp decodes bytes of a header that are not UTF-8 as surrogates.
    return hashlib.sha256(bearer.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """A request of an agent program. The names of the fields are keys of a message between
    processes."""

    key: str
    """Digest of its bearer."""
    path: str
    body: bytes = field(repr=False)
    repeats: int | None = None
    """Number of earlier times that its client has sent it; None: the client does not count them."""
    idempotency: str = ""
    """Digest of its idempotency key, which is the same for all retries of a request; empty: it has
    no key."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to an agent program."""

    status: int
    body: bytes = field(repr=False)
    content_type: str = JSON

    @classmethod
    def error(cls, status: int, code: str, detail: str, path: str = "") -> Reply:
        """Error in the format for clients of a ``path``: Anthropic's or OpenAI's. Both contain the
        ``code``."""
        error: dict[str, Any]
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
        """Reply to a request without a session."""
        return cls.error(401, "unknown_bearer", "no session has this bearer, or it has ended", path)


class Front:
    """Server on the loopback address; for one event loop."""

    def __init__(
        self,
        knows: Callable[[str], Awaitable[bool]],
        answer: Callable[[ProgramRequest], Awaitable[Reply]],
    ) -> None:
        """``knows(key)``: whether a bearer with this digest has a session; it is called before the
        body of a request is read. ``answer`` returns the reply to a request."""
        self._knows, self._answer = knows, answer
        self.limits = HttpLimits()
        self.url = ""

    @property
    def refused(self) -> Counter[str]:
        """Refused requests and connections, by reason."""
        return self.limits.refused

    async def start(self) -> None:
        """Listen at a free port."""
        loop = asyncio.get_running_loop()
        self._server = web.Server(
            self._handle,
            # A request is cancelled when its client hangs up.
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            access_log=None,
            logger=self.limits.malformed_logger(f"{__name__}.requests"),
        )
        listening = socket.create_server((LOOPBACK, 0))
        self._listener = await loop.create_server(self._connected, sock=listening)
        self.url = f"http://{LOOPBACK}:{listening.getsockname()[1]}"

    async def close(self) -> None:
        self._listener.close()
        await self._server.shutdown(1.0)

    def _connected(self) -> web.RequestHandler:
        return self.limits.add_connection(self._server())

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        reply = await self._reply(request)
        # Clients of OpenAI and Anthropic retry errors unless this header forbids it. A retry has
        # the same result, and refusals are counted.
        headers = {} if reply.status == 200 else {"x-should-retry": "false"}
        return web.Response(
            status=reply.status, body=reply.body, content_type=reply.content_type, headers=headers
        )

    async def _reply(self, request: web.BaseRequest) -> Reply:
        key = key_of(_bearer(request))
        if not await self._knows(key):
            self.refused["unknown_bearer"] += 1
            return Reply.unknown_bearer(request.path)
        self.limits.prove(request.protocol)
        try:
            body = await read_body(request, MAX_BYTES)
        except TooLargeError:
            return self._too_large(request.path)
        except TimeoutError:
            self.refused["slow"] += 1
            return Reply.error(
                408, "slow", f"the body has not come within {BODY_S:g} s", request.path
            )
        except web.RequestPayloadError:
            self.refused["malformed"] += 1
            return Reply.error(
                400, "malformed", "the body is not encoded as its headers say", request.path
            )
        return await self._answer(
            ProgramRequest(key, request.path, body, _repeats(request), _idempotency(request))
        )

    def _too_large(self, path: str) -> Reply:
        self.refused["too_large"] += 1
        return Reply.error(413, "too_large", f"a request may have {MAX_BYTES} bytes", path)


def _bearer(request: web.BaseRequest) -> str:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _repeats(request: web.BaseRequest) -> int | None:
    """Retry count that clients of OpenAI and Anthropic send; None: the client sends none."""
    count = request.headers.get("x-stainless-retry-count")
    if count is None:
        return None
    is_number = count.isascii() and count.isdecimal() and len(count) <= _MAX_DIGITS
    return int(count) if is_number else 0


def _idempotency(request: web.BaseRequest) -> str:
    key = request.headers.get("idempotency-key", "")
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest() if key else ""
