"""Routes of member processes, which connect engines that the run cannot reach itself.

A member opens a websocket and gets requests for its engine over it. It fetches versions of the
weights from here. Its token permits nothing else. The rollout process sends its requests to
`/members/{member}/engine/...`, with the token of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from pathlib import Path
from typing import Any

from aiohttp import web

from relax_hpc.net.http_limits import TooLargeError, read_body
from relax_hpc.queue.operations import LEFT, OUT, ExternalEngine, MemberToken, OperationRefused
from relax_hpc.service import relay
from relax_hpc.service.app import MEMBER, ApiError, digest_token, read_json
from relax_hpc.service.documentation import TEXT, documented, mapping
from relax_hpc.service.live_run import HUB_S, HubAwayError, LiveRun
from relax_hpc.service.relay import EngineAwayError, MemberConnection

_MEMBER_NAME = re.compile(r"[0-9a-f]{8,64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERSION_NAME = re.compile(r"i\d{6}-v\d{6,7}")
_TOKEN_BYTES = 32
_WATCH_S = 2.0
"""Seconds between two looks at the state of an engine, if nothing has changed."""
_GONE = "the token was revoked"
_TOKEN = mapping({"id": TEXT, "token": TEXT})


def routes(live: LiveRun) -> list[web.AbstractRouteDef]:
    """Routes of members of ``live``."""
    members = _Members(live)
    return [
        web.post("/members/tokens", members.add_token),
        web.get("/members/tokens", members.list_tokens),
        web.delete("/members/tokens/{id}", members.revoke_token),
        web.get("/members/connect", members.connect),
        web.route("*", "/members/{member}/engine/{path:.+}", members.forward),
        web.get("/versions/{version}/{file}", members.send_file),
    ]


class _Members:
    """Handlers, and the connections of members."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._connections: dict[str, MemberConnection] = {}
        """By the id of the member."""

    @documented(body=mapping({"label": TEXT}), answers={200: _TOKEN}, errors=(503,))
    async def add_token(self, request: web.Request) -> web.Response:
        """Create a token for `relax-hpc join`. It is shown only here."""
        body = await read_json(request)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        label = body.get("label", "")
        if not isinstance(label, str):
            raise ApiError("bad_request", f"label: found {label!r:.80}, allowed: text")
        adding = self._live.client.operations.add_token(digest_token(token.encode()), label, HUB_S)
        id = await self._live.ask(adding)
        return web.json_response({"id": id, "token": token})

    @documented()
    async def list_tokens(self, request: web.Request) -> web.Response:
        """Tokens that are not revoked, without the tokens themselves."""
        tokens = [
            {"id": token.id, "label": token.label, "created_at": token.created_at}
            for token in self._live.wanted.tokens
        ]
        return web.json_response({"tokens": tokens})

    @documented(errors=(404, 503))
    async def revoke_token(self, request: web.Request) -> web.Response:
        """Revoke a token. Members with it are disconnected, and their engines are lost."""
        id = request.match_info["id"][:80]
        await self._live.ask(self._live.client.operations.revoke_token(id, HUB_S))
        for name, connection in list(self._connections.items()):
            if name.startswith(f"{id}."):
                with contextlib.suppress(EngineAwayError):
                    await connection.send(kind=relay.LEFT, reason="unauthorized", detail=_GONE)
                await connection.close()
        return web.json_response({"id": id})

    async def connect(self, request: web.Request) -> web.StreamResponse:
        """Websocket of a member process; see `relax_hpc.service.relay`."""
        token, name = request.get(MEMBER), request.query.get("member", "")
        if token is None:
            raise ApiError("forbidden", "/members/connect: for a token of a member alone")
        if not _MEMBER_NAME.fullmatch(name):
            raise ApiError("bad_request", f"member: found {name!r:.80}, allowed: hex digits")
        socket = web.WebSocketResponse(
            heartbeat=relay.BEAT_S, max_msg_size=relay.MAX_MESSAGE_BYTES, compress=False
        )
        await socket.prepare(request)
        member, connection = f"{token.id}.{name}", MemberConnection(socket)
        former = self._connections.get(member)
        self._connections[member] = connection
        if former:
            await former.close()
        url = request.query.get("url", "")[:512]
        following = asyncio.create_task(self._follow(connection, token, member, url))
        try:
            await connection.receive()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            if self._connections.get(member) is connection:
                del self._connections[member]
        return socket

    async def _follow(
        self, connection: MemberConnection, token: MemberToken, member: str, url: str
    ) -> None:
        """Let the engine of a member join, and tell the member when it has left."""
        reason, detail = "", ""
        with contextlib.suppress(EngineAwayError):
            try:
                await self._register(connection, token, member, url)
                while (engine := self._engine(member)) and engine.state != LEFT:
                    # The member may have connected while the token was being revoked.
                    if token.id not in [valid.id for valid in self._live.wanted.tokens]:
                        raise OperationRefused("unauthorized", _GONE)
                    await connection.send(kind=relay.STATE, text=_describe(engine))
                    await self._live.wait_for_change(_WATCH_S)
                if engine:
                    reason, detail = engine.reason, engine.detail
            except OperationRefused as refusal:
                reason, detail = refusal.code, str(refusal)
            await connection.send(kind=relay.LEFT, reason=reason, detail=detail)
            await connection.close()

    async def _register(
        self, connection: MemberConnection, token: MemberToken, member: str, url: str
    ) -> None:
        """Create the operation by which the engine joins, unless it was created before.
        OperationRefused: it may not join."""
        body = {"members": [{"member": member, "token": token.id, "url": url}]}
        limit_s = self._live.config.service.scale_out_timeout_s
        while not self._engine(member):
            creating = self._live.client.operations.create(
                OUT, body, f"join-{member}", timeout_s=limit_s, timeout=HUB_S
            )
            try:
                await self._live.ask(creating)
            except OperationRefused as refusal:
                if refusal.code != "busy":
                    raise
                await connection.send(kind=relay.STATE, text=f"waits: {refusal}")
            except HubAwayError as error:
                await connection.send(kind=relay.STATE, text=f"waits: {error}")
            await self._live.wait_for_change(_WATCH_S)

    def _engine(self, member: str) -> ExternalEngine | None:
        external = self._live.wanted.external
        return next((engine for engine in external if engine.member == member), None)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Send a request to the engine of a member, and stream its reply."""
        if MEMBER in request:
            raise ApiError("forbidden", f"{request.path}: not for a token of a member")
        connection = self._connections.get(request.match_info["member"])
        if connection is None:
            raise ApiError("member_away", "the member of this engine is not connected")
        path = f"/{request.match_info['path']}"
        if request.query_string:
            path += f"?{request.query_string}"
        try:
            body = await read_body(request, relay.MAX_MESSAGE_BYTES // 2)
            reply = await connection.request(request.method, path, body)
        except TooLargeError:
            raise ApiError("too_large", f"{path}: the body is too large") from None
        except EngineAwayError as error:
            raise ApiError("member_away", str(error)) from error
        try:
            return await self._stream(request, connection, reply)
        finally:
            await asyncio.shield(connection.finish(reply.number))

    async def _stream(
        self, request: web.Request, connection: MemberConnection, reply: relay.RelayedReply
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=reply.status, headers={"Content-Type": reply.content_type}
        )
        await response.prepare(request)
        try:
            async for data in connection.read_data(reply.number):
                await response.write(data)
        except EngineAwayError:
            # The client must not take the reply for complete.
            if request.transport:
                request.transport.abort()
            return response
        await response.write_eof()
        return response

    async def send_file(self, request: web.Request) -> web.StreamResponse:
        """Send a file of a version that was written for external engines. Ranges are supported."""
        version, name = request.match_info["version"], request.match_info["file"]
        if not (_VERSION_NAME.fullmatch(version) and _FILE_NAME.fullmatch(name)):
            raise ApiError("not_found", f"{request.path}: no such file")
        path = Path(self._live.run.root, "external", version, name)
        if not await asyncio.to_thread(path.is_file):
            raise ApiError("not_found", f"{request.path}: the run has a newer version")
        return web.FileResponse(path)


def _describe(engine: ExternalEngine) -> str:
    parts: list[Any] = [engine.name, engine.state, engine.phase, engine.reason, engine.detail]
    return " ".join(filter(None, parts))
