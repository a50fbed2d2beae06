"""The HTTP application of the service: authentication, limits, errors, and all routes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from relax_hpc.base.terminal_text import log_entry
from relax_hpc.net.http_limits import (
    BODY_S,
    IDLE_S,
    HttpLimits,
    TooLargeError,
    read_bearer,
    read_body,
)
from relax_hpc.queue.controller.messages import MAX_WHOLE
from relax_hpc.queue.operations import MemberToken, OperationRefused
from relax_hpc.service.documentation import BOOLEAN, TEXT, documented, make_document, mapping
from relax_hpc.service.live_run import HubAwayError, LiveRun

LIVE = web.AppKey("live", LiveRun)
LIMITS = web.AppKey("limits", HttpLimits)
TOKEN = web.AppKey("token", bytes)
MEMBER = web.RequestKey("member_token", MemberToken)
"""Key of a request: the MemberToken with which it came. The token of the run has none."""
PUBLIC = ("/health",)
"""Paths that need no token."""
PAGE = "/page"
"""Path of the page, and beginning of its other paths. Its handlers check the session of the
browser (`page/session.py`)."""
MEMBER_PATHS = ("/members/", "/versions")
"""Beginnings of paths that a token of a member process may use, except `ADMIN_PATHS`."""
ADMIN_PATHS = ("/members/tokens",)
_MAX_CONCURRENT = 128
"""Most requests of the run's token that are answered at the same time."""
_RETRY_S = 2
"""Seconds after which a client may try again while the hub is away."""
_STATUS = {
    "bad_request": 400,
    "protected": 400,
    "below_minimum": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "unknown_operation": 404,
    "unknown_engine": 404,
    "unknown_token": 404,
    "not_found": 404,
    "slow": 408,
    "busy": 409,
    "too_late": 409,
    "colocate": 409,
    "too_large": 413,
    "key_reused": 422,
    "model_mismatch": 422,
    "flags_missing": 422,
    "too_many_requests": 429,
    "internal": 500,
    "hub_away": 503,
    "member_away": 503,
}
"""HTTP status of each code of an error."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(Exception):
    """An error with a code of the API. Handlers raise it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def error_response(code: str, message: str) -> web.Response:
    """Answer with an error. Clients of Relax read `detail`."""
    content = {"error": {"code": code, "message": message}, "detail": message}
    headers = {"Retry-After": str(_RETRY_S)} if _STATUS[code] in (429, 503) else {}
    return web.json_response(content, status=_STATUS[code], headers=headers)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body of a request; empty: there is no body. ApiError: it is malformed,
    too large or too slow."""
    max_bytes = request.app[LIVE].config.service.max_body
    try:
        body = await read_body(request, max_bytes)
        value = json.loads(body) if body.strip() else {}
    except TooLargeError:
        text = f"the body has more than service.max_body={max_bytes} bytes"
        raise ApiError("too_large", text) from None
    except TimeoutError:
        raise ApiError("slow", f"the body has not come within {BODY_S:g} s") from None
    except (ValueError, RecursionError, web.RequestPayloadError) as error:
        raise ApiError("bad_request", f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError("bad_request", "the body is no JSON object")
    for name, item in value.items():
        # Larger numbers cannot be sent to the hub.
        if isinstance(item, int | float) and not abs(item) < MAX_WHOLE:
            raise ApiError("bad_request", f"{name!r:.80}: the number is too large")
    return value


def make_app(
    live: LiveRun, token: str, routes: Iterable[web.AbstractRouteDef], limits: HttpLimits
) -> web.Application:
    """The application with ``routes``, whose requests need the bearer ``token``."""
    guard = _Guard(live, token, limits)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await guard.handle(request, handler)

    app = web.Application(middlewares=[check], client_max_size=live.config.service.max_body)
    app[LIVE], app[LIMITS], app[TOKEN] = live, limits, token.encode()
    app.add_routes([web.get("/health", health), web.get("/openapi.json", openapi), *routes])
    return app


@documented(answers={200: mapping({"status": TEXT, "hub": BOOLEAN})})
async def health(request: web.Request) -> web.Response:
    """Whether the service runs, and whether the hub answers it."""
    return web.json_response({"status": "ok", "hub": not request.app[LIVE].is_hub_away})


@documented()
async def openapi(request: web.Request) -> web.Response:
    """This document."""
    return web.json_response(make_document(request.app))


class _Guard:
    """Checks tokens and limits of requests, and turns errors into answers."""

    def __init__(self, live: LiveRun, token: str, limits: HttpLimits) -> None:
        self._live, self._limits = live, limits
        self._token = token.encode()
        self._concurrent = 0

    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await self._respond(request, handler)
        self._live.counts[f"status_{response.status}"] += 1
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_of_page = request.path == PAGE or request.path.startswith(f"{PAGE}/")
        needs_token = request.path not in PUBLIC and not is_of_page
        if needs_token:
            try:
                self._check_token(request)
            except ApiError as error:
                self._limits.refused[error.code] += 1
                return error_response(error.code, str(error))
            self._limits.prove(request.protocol)
        # Without the run's token, a few slow clients could otherwise use up the limit.
        is_limited = needs_token and MEMBER not in request and not _is_for_engine(request)
        if is_limited and self._concurrent >= _MAX_CONCURRENT:
            text = f"{_MAX_CONCURRENT} requests are being answered; try again"
            return error_response("too_many_requests", text)
        self._concurrent += is_limited
        try:
            return await self._answer(request, handler)
        finally:
            self._concurrent -= is_limited

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return error_response(error.code, str(error))
        except OperationRefused as refusal:
            code = refusal.code if refusal.code in _STATUS else "bad_request"
            return error_response(code, str(refusal))
        except HubAwayError as error:
            return error_response("hub_away", str(error))
        except web.HTTPNotFound:
            text = f"{request.method} {request.path}: no such path; see /openapi.json"
            return error_response("not_found", text)
        except web.HTTPMethodNotAllowed as error:
            text = f"{request.method} {request.path}: allowed: {', '.join(error.allowed_methods)}"
            return error_response("not_found", text)
        except web.HTTPException:
            raise
        except Exception as error:
            # A fault of a handler must not end the connection without an answer.
            print(log_entry(traceback.format_exc().rstrip()), flush=True)
            return error_response("internal", f"{type(error).__name__}; see the log of role api")

    def _check_token(self, request: web.Request) -> None:
        """ApiError: the request has no valid token for its path."""
        # aiohttp decodes bytes of a header that are not UTF-8 as surrogates.
        bearer = read_bearer(request).encode(errors="surrogateescape")
        if hmac.compare_digest(bearer, self._token):
            return
        member = self._find_member(bearer)
        is_for_members = request.path.startswith(MEMBER_PATHS)
        if member is None and bearer and is_for_members and self._live.wanted.revision < 0:
            # A member would take 401 for a revoked token, and end.
            raise ApiError("hub_away", "the tokens of members are not known yet; try again")
        if member is None:
            text = "the request has no valid bearer token; RUN/service/api.json has it"
            raise ApiError("unauthorized", text)
        if not is_for_members or request.path.startswith(ADMIN_PATHS):
            raise ApiError("forbidden", f"{request.path}: not for a token of a member")
        request[MEMBER] = member

    def _find_member(self, bearer: bytes) -> MemberToken | None:
        if not bearer:
            return None
        digest = digest_token(bearer)
        tokens = self._live.wanted.tokens
        return next((t for t in tokens if hmac.compare_digest(t.digest, digest)), None)


def _is_for_engine(request: web.Request) -> bool:
    """Whether a request is one of the rollout process to the engine of a member. Its own settings
    limit their number."""
    return request.path.startswith("/members/") and "/engine/" in request.path


def digest_token(token: bytes) -> str:
    """Digest of a token, which gives no access."""
    return hashlib.sha256(token).hexdigest()


class Server:
    """A server of an application, on one address; for one event loop."""

    def __init__(self, app: web.Application, listening: socket.socket) -> None:
        self._limits = app[LIMITS]
        self._listening = listening
        self._runner = web.AppRunner(
            app,
            # A request is cancelled when its client hangs up.
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            access_log=None,
            logger=self._limits.malformed_logger(f"{__name__}.requests"),
        )

    async def start(self) -> None:
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connected, sock=self._listening)

    async def close(self) -> None:
        self._listener.close()
        await self._runner.cleanup()

    def _connected(self) -> web.RequestHandler:
        server = self._runner.server
        assert server is not None
        return self._limits.add_connection(server())
