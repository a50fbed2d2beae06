"""Requests to an engine over the websocket that its member process has opened.

Each message is a msgpack map with a `kind`. The service sends `request` (number, method, path,
body) and `cancel` (number). The member answers a request with `head` (number, status,
content_type), any number of `data` (number, data), and `end` or `error` (number, text). The service
also sends `state` (text) and `left` (reason, detail), after which the member ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgpack
from aiohttp import ClientWebSocketResponse, web

MAX_MESSAGE_BYTES = 64 << 20
"""Most bytes of a message: a batch of prompts, or a piece of a response."""
BEAT_S = 5.0
"""Seconds between two pings of an idle connection. Without an answer it is closed."""
REQUEST, CANCEL, STATE, LEFT = "request", "cancel", "state", "left"
HEAD, DATA, END, ERROR = "head", "data", "end", "error"
Socket = web.WebSocketResponse | ClientWebSocketResponse


def pack(**message: Any) -> bytes:
    """Encode a message."""
    return msgpack.packb(message)


def unpack(data: bytes) -> dict[str, Any]:
    """A message. ValueError: it is malformed."""
    message = msgpack.unpackb(data)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("a message is no map with a kind")
    return message


class EngineAwayError(Exception):
    """The engine, or its member process, has not answered."""


@dataclass(slots=True)
class RelayedReply:
    """Reply of an engine. Its data follow in `MemberConnection.read_data`."""

    number: int
    status: int
    content_type: str


class MemberConnection:
    """The service's end of the connection to one member process."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        """Answers that have come, by the number of their request."""
        self._is_closed = False

    async def send(self, **message: Any) -> None:
        """Send a message. EngineAwayError: the connection is closed."""
        try:
            await self._socket.send_bytes(pack(**message))
        except (ConnectionError, RuntimeError) as error:
            raise EngineAwayError(f"the member has disconnected: {error}") from error

    async def receive(self) -> None:
        """Receive answers until the connection ends."""
        try:
            async for message in self._socket:
                if message.type is web.WSMsgType.BINARY:
                    answer = unpack(message.data)
                    number = answer.get("number")
                    waiting = self._answers.get(number) if isinstance(number, int) else None
                    if waiting:
                        waiting.put_nowait(answer)
        except ValueError:
            # A member that sends something else is not read any more.
            pass
        finally:
            self._is_closed = True
            for waiting in self._answers.values():
                waiting.put_nowait({"kind": ERROR, "text": "the member has disconnected"})

    async def close(self) -> None:
        """Close the connection."""
        await self._socket.close()

    async def request(self, method: str, path: str, body: bytes) -> RelayedReply:
        """Send a request to the engine. Call `finish` with the number of the reply in any case.
        EngineAwayError: there is no reply."""
        if self._is_closed:
            raise EngineAwayError("the member has disconnected")
        number = next(self._numbers)
        self._answers[number] = asyncio.Queue()
        try:
            await self.send(kind=REQUEST, number=number, method=method, path=path, body=body)
            head = await self._next(number)
            status, content_type = head.get("status"), head.get("content_type")
            if not (isinstance(status, int) and 200 <= status < 600):
                raise EngineAwayError(f"the member has sent the status {status!r:.40}")
            return RelayedReply(number, status, str(content_type))
        except BaseException:
            await asyncio.shield(self.finish(number))
            raise

    async def read_data(self, number: int) -> AsyncIterator[bytes]:
        """Data of the reply to request ``number``. EngineAwayError: it broke off."""
        while (answer := await self._next(number))["kind"] != END:
            data = answer.get("data")
            # bytes(number) would allocate that many bytes.
            if not isinstance(data, bytes):
                raise EngineAwayError("the member has sent a malformed reply")
            yield data
        del self._answers[number]

    async def finish(self, number: int) -> None:
        """Forget request ``number``. It is cancelled unless its reply has ended."""
        if self._answers.pop(number, None) and not self._is_closed:
            try:
                await self.send(kind=CANCEL, number=number)
            except EngineAwayError:
                self._is_closed = True

    async def _next(self, number: int) -> dict[str, Any]:
        answer = await self._answers[number].get()
        if answer["kind"] == ERROR:
            raise EngineAwayError(str(answer.get("text", "")))
        return answer
