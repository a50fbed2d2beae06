"""Requests and answers both ways over one connection whose ends know each other, in one event
loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from relax_hpc.net.transport.wire import (
    MAC_BYTES,
    MAX_MESSAGE_BYTES,
    BadMessage,
    Bytes,
    pack,
    unpack,
)

MAX_PAYLOAD_BYTES = MAX_MESSAGE_BYTES - MAC_BYTES
"""Bytes of a request or an answer at most. A longer one is refused where it is sent."""

Message = dict[str, Any]


class PeerGone(Exception):
    """Error of a request whose other end has gone, or that it cannot answer."""


class TooLarge(ValueError):
    """Error of a request of more than `MAX_PAYLOAD_BYTES`."""


class Exchange:
    """One end of a connection.

    >>> async def talk():
    ...     async def double(message):
    ...         return {"twice": 2 * message["number"]}
    ...     one = Exchange(lambda payload: two.receive(payload), double)
    ...     two = Exchange(lambda payload: one.receive(payload), double)
    ...     return await one.call(number=3)
    >>> asyncio.run(talk())["twice"]
    6
    """

    def __init__(
        self, send: Callable[[bytes], None], serve: Callable[[Message], Awaitable[Message]]
    ) -> None:
        """``send`` a payload to the other end; ``serve`` gives the answer to a request of that end,
        or raises what that is told."""
        self._send, self._serve = send, serve
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        """Requests of the other end that are being answered, by their numbers."""

    async def call(self, **message: Any) -> Message:
        """The other end's answer to ``message``. If this is cancelled, so is the work of the other
        end.

        Gone: there will be no answer. TooLarge: ``message`` has more than `MAX_PAYLOAD_BYTES`."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        payload = pack({"id": number, **message})
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLarge(f"a request of {len(payload)} bytes, allowed: {MAX_PAYLOAD_BYTES}")
        self._asked[number] = answer
        try:
            self._send(payload)
            return await answer
        except OSError as error:
            raise PeerGone(str(error)) from error
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._send(pack({"cancel": number}))
            raise
        finally:
            del self._asked[number]

    def receive(self, payload: Bytes) -> None:
        """Take what the other end has sent. BadMessage: it is nothing that one of ours sends."""
        message = unpack(payload)
        if "cancel" in message:
            if task := self._serving.get(_number(message["cancel"])):
                task.cancel()
        elif "re" not in message:
            number = _number(message.get("id"))
            self._serving[number] = task = asyncio.create_task(self._answer(message))
            task.add_done_callback(lambda ended: self._forget(number, ended))
        elif (answer := self._asked.get(_number(message["re"]))) and not answer.done():
            if "gone" in message:
                answer.set_exception(PeerGone(str(message["gone"])))
            else:
                answer.set_result(message)

    def _forget(self, number: int, ended: asyncio.Task[None]) -> None:
        if self._serving.get(number) is ended:
            del self._serving[number]

    async def _answer(self, message: Message) -> None:
        number = message.get("id")
        try:
            payload = pack({**await self._serve(message), "re": number})
        except PeerGone as gone:
            payload = _refusal(number, str(gone))
        except (
            Exception
        ) as error:  # also of `pack`: without any answer, the other end would wait for ever
            payload = _refusal(number, f"{type(error).__name__}: {error}")
        if len(payload) > MAX_PAYLOAD_BYTES:
            # The other end would close the connection, on which other requests wait.
            payload = _refusal(
                number, f"an answer of {len(payload)} bytes, allowed: {MAX_PAYLOAD_BYTES}"
            )
        with contextlib.suppress(OSError):
            self._send(payload)

    def end(self, why: str) -> None:
        """The connection has ended: nobody is answered any more."""
        for task in self._serving.values():
            task.cancel()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(PeerGone(why))


def _refusal(number: Any, reason: str) -> bytes:
    """Payload that refuses the request ``number``. The text of an error may have half of a
    character, which UTF-8 lacks."""
    return pack({"gone": reason.encode(errors="replace").decode(), "re": number})


def _number(number: Any) -> int:
    if not isinstance(number, int):
        raise BadMessage(
            f"found {str(number)[:80]!r} as the number of a request, allowed: an integer"
        )
    return number
