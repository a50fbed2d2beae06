"""The connecting end: a rollout process, or a forwarder, at the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from relax_hpc.errors import DeadlineError
from relax_hpc.gateway.exchange import Exchange, Message
from relax_hpc.gateway.place import Place, newest_place, purpose_of
from relax_hpc.rundir import RunDir
from relax_hpc.transport.sockets import Connection, connect
from relax_hpc.transport.wire import BadMessage

_CONNECT_S = 5.0
"""Seconds for a try to connect."""
_AGAIN_S = 0.2
"""Seconds between two tries."""


class Link:
    """An open connection, made by `reach`; for one event loop."""

    def __init__(self, place: Place, connection: Connection, serve: Callable[[Message], Awaitable[Message]]) -> None:
        self.place, self._connection = place, connection
        self._exchange = Exchange(self._send, serve)
        self.call = self._exchange.call
        self.lost = asyncio.Event()
        """Event that is set when it has ended."""
        asyncio.get_running_loop().add_reader(connection.socket, self._receive)

    def close(self, why: str = "it was closed") -> None:
        """End it; safe to call twice."""
        if not self.lost.is_set():
            self.lost.set()
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._connection.socket)
            loop.remove_writer(self._connection.socket)
            self._connection.close()
            self._exchange.end(f"the connection to the gateway has ended: {why}")

    def _receive(self) -> None:
        try:
            self._connection.receive()
            for payload in self._connection.payloads():
                self._exchange.take(payload)
        except (OSError, BadMessage) as error:
            self.close(str(error))

    def _send(self, payload: bytes) -> None:
        if self.lost.is_set():
            raise ConnectionError("the connection to the gateway has ended")
        self._connection.send(payload)
        if self._connection.waits:
            asyncio.get_running_loop().add_writer(self._connection.socket, self._flush)

    def _flush(self) -> None:
        try:
            self._connection.flush()
        except OSError as error:
            return self.close(str(error))
        if not self._connection.waits:
            asyncio.get_running_loop().remove_writer(self._connection.socket)


async def reach(run: RunDir, serve: Callable[[Message], Awaitable[Message]], limit_s: float) -> Link:
    """A connection to the newest gateway of a run; ``serve`` answers what it asks. DeadlineError: there is none within
    ``limit_s``."""
    until, why = time.monotonic() + limit_s, "none has said where it is"
    while time.monotonic() < until:
        if place := await asyncio.to_thread(newest_place, run):
            try:
                made = await asyncio.to_thread(
                    connect, place.endpoint, run.token(), purpose_of(place.incarnation), _CONNECT_S
                )
                return Link(place, made, serve)
            except OSError as error:
                why = f"{place.endpoint}: {error}"
        await asyncio.sleep(_AGAIN_S)
    raise DeadlineError(f"no gateway within {limit_s:.0f} s: {why}; open the log of role gateway in logs/hub")
