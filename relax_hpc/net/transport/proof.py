"""Proofs of both ends of a connection that they hold the run's token, and a key that only they
know.

The token itself is never sent: each end answers the other's random challenge with an HMAC over both
challenges and the purpose of the listener that is meant. Nothing here sends or waits:
`planes.links` does with a thread for each connection, `sockets` and `listener` with one thread for
all.

    the listening end    GREETING_BYTES   what it is, and its challenge
    the connecting end   ANSWER_BYTES     its challenge, and its proof
    the listening end    PROOF_BYTES      its proof, without which the other end says nothing more
"""

from __future__ import annotations

import hmac
import secrets

PROOF_S = 5.0
"""Seconds in which both ends must have proven themselves."""
MAX_UNPROVEN = 256
"""Connections of one listener that have not proven themselves, at most. A further one takes the
place of the oldest: of those who hold the token each needs but a moment."""
_HELLO = b"RLXLINK1"
_CHALLENGE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(_HELLO) + _CHALLENGE_BYTES
ANSWER_BYTES = _CHALLENGE_BYTES + PROOF_BYTES


def _mac(token: bytes, what: bytes, challenges: bytes, purpose: bytes) -> bytes:
    return hmac.digest(token, what + challenges + purpose, "sha256")


class Challenge:
    """The listening end's part. It hashes ANSWER_BYTES of a stranger once, and nothing else.

    >>> listening = Challenge(b"token", b"purpose")
    >>> connecting = ChallengeResponse(b"token", b"purpose")
    >>> proof, key = listening.check(connecting.answer(listening.greeting))
    >>> connecting.check(proof) == key
    True
    """

    __slots__ = ("_own", "_purpose", "_token", "greeting")

    def __init__(self, token: bytes, purpose: bytes) -> None:
        self._token, self._purpose, self._own = (
            token,
            purpose,
            secrets.token_bytes(_CHALLENGE_BYTES),
        )
        self.greeting = _HELLO + self._own

    def check(self, answer: bytes) -> tuple[bytes, bytes]:
        """The proof to send, and the connection's key; ConnectionError if who ``answer``s does not
        hold the token."""
        challenges, proof = self._own + answer[:_CHALLENGE_BYTES], answer[_CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, _mac(self._token, b"reader", challenges, self._purpose)):
            raise ConnectionError("the peer has not proved that it holds the run's token")
        own = _mac(self._token, b"maker", challenges, self._purpose)
        return own, _mac(self._token, b"key", challenges, self._purpose)


class ChallengeResponse:
    """Part of the connecting end."""

    __slots__ = ("_challenges", "_purpose", "_token")

    def __init__(self, token: bytes, purpose: bytes) -> None:
        self._token, self._purpose, self._challenges = token, purpose, b""

    def answer(self, greeting: bytes) -> bytes:
        """Answer to send. ConnectionError if ``greeting`` is none."""
        if not greeting.startswith(_HELLO):
            raise ConnectionError("what listens there is no listener of a run")
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        self._challenges = greeting[len(_HELLO) :] + own
        return own + _mac(self._token, b"reader", self._challenges, self._purpose)

    def check(self, proof: bytes) -> bytes:
        """The connection's key; ConnectionError if who listens does not hold the token."""
        if not hmac.compare_digest(
            proof, _mac(self._token, b"maker", self._challenges, self._purpose)
        ):
            raise ConnectionError("the peer has not proved that it holds the run's token")
        return _mac(self._token, b"key", self._challenges, self._purpose)
