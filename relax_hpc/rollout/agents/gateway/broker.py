"""Sessions of rollout processes. A request with the bearer of a session is answered by the rollout
process that opened the session."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from relax_hpc.net.transport.calls import CallListener
from relax_hpc.net.transport.exchange import Message, PeerGone
from relax_hpc.rollout.agents.gateway.front import ProgramRequest, Reply


@dataclass(frozen=True, slots=True)
class _OpenSession:
    peer: int
    """Number of the connection of its rollout process."""
    name: str


class Broker:
    """Listening end of the connections of rollout processes and forwarders, which authenticate with
    the run's token."""

    def __init__(self, listening: socket.socket, token: bytes, purpose: bytes) -> None:
        """See `CallListener`."""
        self._listener = CallListener(listening, token, purpose, self._answer_peer, self._forget)
        self.endpoint = self._listener.endpoint
        self._sessions: dict[str, _OpenSession] = {}
        """Sessions by the digest of their bearer."""
        self.request_count = 0
        """Requests so far with the bearer of a session."""

    async def knows(self, key: str) -> bool:
        """Whether there is a session whose bearer has the digest ``key``."""
        return key in self._sessions

    async def serve(self) -> None:
        """Serve peers until cancelled."""
        await self._listener.run()

    async def answer(self, request: ProgramRequest) -> Reply:
        """Reply of the rollout process that opened the session."""
        session = self._sessions.get(request.key)
        if not session:
            return Reply.unknown_bearer(request.path)
        self.request_count += 1
        message = {
            "session": session.name,
            "path": request.path,
            "body": request.body,
            "repeats": request.repeats,
            "idempotency": request.idempotency,
        }
        try:
            reply = await self._listener.call(session.peer, do="ask", **message)
        except PeerGone as gone:
            return Reply.error(503, "session_gone", f"the session has ended: {gone}", request.path)
        return decode_reply(reply)

    async def _answer_peer(self, number: int, message: Message) -> Message:
        """Answer to a call of peer ``number``. LookupError, ValueError: the call is invalid."""
        match message["do"]:
            case "open":
                if not self._may_use(number, message["key"]):
                    raise ValueError("another peer has a session with this key")
                self._sessions[message["key"]] = _OpenSession(number, message["session"])
            case "close":
                if self._may_use(number, message["key"]):
                    self._sessions.pop(message["key"], None)
            case "knows":
                return {"known": await self.knows(message["key"])}
            case "request":
                request = ProgramRequest(
                    *(message[name] for name in ("key", "path", "body", "repeats", "idempotency"))
                )
                return encode_reply(await self.answer(request))
            case unknown:
                raise ValueError(f"found {unknown!r}")
        return {}

    def _may_use(self, number: int, key: str) -> bool:
        """Whether peer ``number`` may open or close the session with ``key``."""
        session = self._sessions.get(key)
        return session is None or session.peer == number

    def _forget(self, number: int) -> None:
        for key in [key for key, session in self._sessions.items() if session.peer == number]:
            del self._sessions[key]


def encode_reply(reply: Reply) -> Message:
    """``reply`` as a message between processes."""
    return {"status": reply.status, "body": reply.body, "content_type": reply.content_type}


def decode_reply(message: Message) -> Reply:
    """The reply in a message of `encode_reply`."""
    return Reply(message["status"], message["body"], message["content_type"])
