"""Sessions, and the rollout processes that have opened them: who asks by a bearer is answered by
its opener."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from relax_hpc.net.transport.calls import CallListener
from relax_hpc.net.transport.exchange import Message, PeerGone
from relax_hpc.rollout.agents.gateway.front import Asked, Reply


@dataclass(frozen=True, slots=True)
class _Session:
    peer: int
    """Number of the connection of who has opened it."""
    name: str


class Broker:
    """Listening end of the connections of rollout processes and forwarders, which hold the run's
    token."""

    def __init__(self, listening: socket.socket, token: bytes, purpose: bytes) -> None:
        """See `CallListener`."""
        self._listener = CallListener(listening, token, purpose, self._served, self._forget)
        self.endpoint = self._listener.endpoint
        self._sessions: dict[str, _Session] = {}
        """Sessions by the digest of their bearer."""
        self.asked = 0
        """Requests so far that had a session."""

    async def knows(self, key: str) -> bool:
        """Whether there is a session whose bearer has this digest."""
        return key in self._sessions

    async def serve(self) -> None:
        """Serve peers until cancelled."""
        await self._listener.run()

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
            answer = await self._listener.call(session.peer, do="ask", **request)
        except PeerGone as gone:
            return Reply.error(503, "session_gone", f"the session has ended: {gone}", asked.path)
        return reply_of(answer)

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
                request = Asked(
                    *(message[name] for name in ("key", "path", "body", "repeats", "idempotency"))
                )
                return message_of(await self.ask(request))
            case other:
                raise ValueError(f"found {other!r}")
        return {}

    def _own(self, number: int, key: str) -> bool:
        session = self._sessions.get(key)
        return session is None or session.peer == number

    def _forget(self, number: int) -> None:
        for key in [key for key, session in self._sessions.items() if session.peer == number]:
            del self._sessions[key]


def message_of(reply: Reply) -> Message:
    """``reply`` as what is sent between processes."""
    return {"status": reply.status, "body": reply.body, "content_type": reply.content_type}


def reply_of(message: Message) -> Reply:
    """The reply that a message of `message_of` is."""
    return Reply(message["status"], message["body"], message["content_type"])
