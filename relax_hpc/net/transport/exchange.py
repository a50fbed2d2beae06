"""Requests and answers in both directions over one connection, in one event loop."""

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
"""Bytes of a request or an answer, at most. The sender refuses a longer one."""

Message = dict[str, Any]


class PeerGone(Exception):
    """Error of a request whose peer has ended, or has refused to answer."""


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
        """``send`` sends a payload to the other end. ``serve`` returns the answer to a request of
        the other end; the text of its exception is sent back."""
        self._send, self._serve = send, serve
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        """Requests of the other end that are in progress, by number."""

    async def call(self, **message: Any) -> Message:
        """The other end's answer to ``message``. A cancellation also cancels the work there.

        PeerGone: there will be no answer. TooLarge: ``message`` has more than `MAX_PAYLOAD_BYTES`.
        """
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        payload = pack({"id": number, **message})
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLarge(f"a request of {len(payload)} bytes, allowed: {MAX_PAYLOAD_BYTES}")
        self._pending[number] = answer
        try:
            self._send(payload)
            return await answer
        except OSError as error:
            raise PeerGone(str(error)) from error
        except asyncio.CancelledError:
            # The other end stops its work. Its late answer has no pending request and is ignored.
            with contextlib.suppress(OSError):
                self._send(pack({"cancel": number}))
            raise
        finally:
            del self._pending[number]

    def receive(self, payload: Bytes) -> None:
        """Process a payload from the other end. BadMessage: it is invalid."""
        message = unpack(payload)
        if "cancel" in message:
            if task := self._serving.get(_number(message["cancel"])):
                task.cancel()
        elif "re" not in message:
            number = _number(message.get("id"))
            self._serving[number] = task = asyncio.create_task(self._answer(message))
            task.add_done_callback(lambda ended: self._forget(number, ended))
        else:
            self._resolve(_number(message["re"]), message)

    def _resolve(self, number: int, message: Message) -> None:
        """Pass an answer to the request ``number``, unless it was cancelled."""
        answer = self._pending.get(number)
        if answer is None or answer.done():
            return
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
        except Exception as error:
            # Errors of `pack` too: without an answer, the other end would wait for ever.
            payload = _refusal(number, f"{type(error).__name__}: {error}")
        if len(payload) > MAX_PAYLOAD_BYTES:
            # The other end would close the connection, and its other requests would fail.
            payload = _refusal(
                number, f"an answer of {len(payload)} bytes, allowed: {MAX_PAYLOAD_BYTES}"
            )
        with contextlib.suppress(OSError):
            self._send(payload)

    def end(self, reason: str) -> None:
        """Fail all pending requests and cancel all work, because the connection has ended."""
        for task in self._serving.values():
            task.cancel()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(PeerGone(reason))


def _refusal(number: Any, reason: str) -> bytes:
    """Payload that refuses the request ``number``.

    ``reason`` may have half of a surrogate pair, which UTF-8 cannot represent.
    """
    return pack({"gone": reason.encode(errors="replace").decode(), "re": number})


def _number(number: Any) -> int:
    if not isinstance(number, int):
        raise BadMessage(
            f"found {str(number)[:80]!r} as the number of a request, allowed: an integer"
        )
    return number
