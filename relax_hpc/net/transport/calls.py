"""Requests and answers over authenticated connections, in one event loop, see `exchange`.

CallLink (connecting end)  <--frames-->  CallListener (listening end of any number of links)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from relax_hpc.net.transport.exchange import Exchange, Message
from relax_hpc.net.transport.listener import Listener
from relax_hpc.net.transport.sockets import FrameConnection, connect
from relax_hpc.net.transport.wire import BadMessage

_TURN_S = 0.5
"""Seconds between two checks for connections that have not authenticated in time."""


class CallListener:
    """Listening end of calls."""

    def __init__(
        self,
        listening: socket.socket,
        token: bytes,
        purpose: bytes,
        serve: Callable[[int, Message], Awaitable[Message]],
        forget: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``token``, ``purpose``: see `Listener`. ``serve`` is called with the number of a peer and
        its request, and returns the answer. ``forget`` is called with the number of each peer whose
        connection has ended."""
        self._listener = Listener(listening, token, purpose)
        self.endpoint = self._listener.endpoint
        self._peers: dict[int, Exchange] = {}
        self._serve, self._forget = serve, forget

    async def run(self) -> None:
        """Serve peers until cancelled."""
        loop = asyncio.get_running_loop()
        # On Linux this is the epoll descriptor of the listener's selector, which is itself readable
        # when one of its sockets is.
        loop.add_reader(self._listener.fileno(), self._receive)
        try:
            while True:
                await asyncio.sleep(_TURN_S)
                self._receive()
        finally:
            loop.remove_reader(self._listener.fileno())
            for number in list(self._peers):
                self._end(number, "the listening end closes")
            self._listener.close()

    async def call(self, number: int, **message: object) -> Message:
        """Answer of the peer ``number`` to ``message``. PeerGone: its connection has ended before.
        KeyError: the peer is unknown."""
        return await self._peers[number].call(**message)

    def _receive(self) -> None:
        """Process the messages that have arrived, and forget peers whose connections have ended."""
        for number, payload in self._listener.receive(0.0):
            if number not in self._peers:
                self._peers[number] = self._exchange(number)
            peer = self._peers[number]
            try:
                peer.receive(payload)
            except BadMessage:
                self._listener.refuse(number)
        ended = [number for number in self._peers if not self._listener.has_peer(number)]
        for number in ended:
            self._end(number, "the other end has gone")
        if self._listener.has_more:
            asyncio.get_running_loop().call_soon(self._receive)

    def _exchange(self, number: int) -> Exchange:
        async def serve(message: Message) -> Message:
            return await self._serve(number, message)

        return Exchange(lambda payload: self._listener.send(number, payload), serve)

    def _end(self, number: int, reason: str) -> None:
        self._peers.pop(number).end(reason)
        self._forget(number)


async def serve_nothing(message: Message) -> Message:
    """Refuse every request, for an end that only sends requests. ValueError."""
    raise ValueError("this end answers nothing")


class CallLink:
    """Connecting end of calls. `open_link` makes one."""

    def __init__(
        self,
        connection: FrameConnection,
        serve: Callable[[Message], Awaitable[Message]] = serve_nothing,
    ) -> None:
        self._connection = connection
        self._exchange = Exchange(self._send, serve)
        self.call = self._exchange.call
        self.lost = asyncio.Event()
        """Event that is set when the connection has ended."""
        asyncio.get_running_loop().add_reader(connection.socket, self._receive)

    def close(self, reason: str = "it was closed") -> None:
        """End the connection. Pending requests fail with ``reason``. Safe to call twice."""
        if self.lost.is_set():
            return
        self.lost.set()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._connection.socket)
        loop.remove_writer(self._connection.socket)
        self._connection.close()
        self._exchange.end(f"the connection has ended: {reason}")

    def _receive(self) -> None:
        try:
            self._connection.receive()
            for payload in self._connection.payloads():
                self._exchange.receive(payload)
        except (OSError, BadMessage) as error:
            self.close(str(error))

    def _send(self, payload: bytes) -> None:
        if self.lost.is_set():
            raise ConnectionError("the connection has ended")
        self._connection.send(payload)
        if self._connection.has_backlog:
            asyncio.get_running_loop().add_writer(self._connection.socket, self._flush)

    def _flush(self) -> None:
        try:
            self._connection.flush()
        except OSError as error:
            return self.close(str(error))
        if not self._connection.has_backlog:
            asyncio.get_running_loop().remove_writer(self._connection.socket)


async def open_link(endpoint: str, token: bytes, purpose: bytes, within_s: float) -> CallLink:
    """An authenticated link to ``endpoint``. OSError: there is no connection after ``within_s``
    seconds."""
    # `connect` blocks, and must not block the event loop.
    return CallLink(await asyncio.to_thread(connect, endpoint, token, purpose, within_s))
