"""Sessions, and the rollout processes that have opened them: who asks by a bearer is answered by its opener."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from relax_hpc.gateway.exchange import Exchange, Gone, Message
from relax_hpc.gateway.front import Asked, Reply
from relax_hpc.transport.listener import Listener
from relax_hpc.transport.wire import BadMessage

_TURN_S = 0.5
"""Seconds between two looks at who has not proven itself in time."""


@dataclass(frozen=True, slots=True)
class _Session:
    peer: int
    """Number of the connection of who has opened it."""
    name: str


class Broker:
    """Listening end of the connections of rollout processes and forwarders, which hold the run's token."""

    def __init__(self, listening: socket.socket, token: bytes, purpose: bytes) -> None:
        """See `Listener`."""
        self._listener = Listener(listening, token, purpose)
        self.endpoint = self._listener.endpoint
        self._peers: dict[int, Exchange] = {}
        self._sessions: dict[str, _Session] = {}
        """Sessions by the digest of their bearer."""
        self.asked = 0
        """Requests so far that had a session."""

    async def knows(self, key: str) -> bool:
        """Whether there is a session whose bearer has this digest."""
        return key in self._sessions

    async def serve(self) -> None:
        """Serve peers until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.fileno(), self._hear)
        try:
            while True:
                await asyncio.sleep(_TURN_S)
                self._hear()
        finally:
            loop.remove_reader(self._listener.fileno())
            for peer in list(self._peers):
                self._forget(peer, "the gateway ends")
            self._listener.close()

    async def ask(self, asked: Asked) -> Reply:
        """Answer of who has opened the session."""
        if not (session := self._sessions.get(asked.key)):
            return Reply.unknown_bearer(asked.path)
        self.asked += 1
        request = {
            "session": session.name,
            "path": asked.path,
            "body": asked.body,
            "repeats": asked.repeats,
            "idempotency": asked.idempotency,
        }
        try:
            answer = await self._peers[session.peer].call(do="ask", **request)
        except Gone as gone:
            return Reply.error(503, "session_gone", f"the session has ended: {gone}", asked.path)
        return reply_of(answer)

    def _hear(self) -> None:
        """Take what peers have sent, and part with those that have gone."""
        for number, payload in self._listener.receive(0.0):
            peer = self._peers.get(number) or self._peers.setdefault(number, self._exchange(number))
            try:
                peer.take(payload)
            except BadMessage:
                self._listener.refuse(number)
        for number in [number for number in self._peers if not self._listener.knows(number)]:
            self._forget(number, "who has opened it has gone")
        if self._listener.has_more:
            asyncio.get_running_loop().call_soon(self._hear)

    def _exchange(self, number: int) -> Exchange:
        async def serve(message: Message) -> Message:
            return await self._served(number, message)

        return Exchange(lambda payload: self._listener.send(number, payload), serve)

    async def _served(self, number: int, message: Message) -> Message:
        """Answer to a peer. LookupError, ValueError: it asks for nothing that there is."""
        match message["do"]:
            case "open":
                if not self._own(number, message["key"]):
                    raise ValueError("another has a session of this key")
                self._sessions[message["key"]] = _Session(number, message["session"])
            case "close":
                if self._own(number, message["key"]):
                    self._sessions.pop(message["key"], None)
            case "knows":
                return {"known": await self.knows(message["key"])}
            case "request":
                request = Asked(*(message[name] for name in ("key", "path", "body", "repeats", "idempotency")))
                return message_of(await self.ask(request))
            case other:
                raise ValueError(f"found {other!r}")
        return {}

    def _own(self, number: int, key: str) -> bool:
        session = self._sessions.get(key)
        return session is None or session.peer == number

    def _forget(self, number: int, why: str) -> None:
        self._peers.pop(number).end(why)
        for key in [key for key, session in self._sessions.items() if session.peer == number]:
            del self._sessions[key]


def message_of(reply: Reply) -> Message:
    """``reply`` as what is sent between processes."""
    return {"status": reply.status, "body": reply.body, "content_type": reply.content_type}


def reply_of(message: Message) -> Reply:
    """The reply that a message of `message_of` is."""
    return Reply(message["status"], message["body"], message["content_type"])
