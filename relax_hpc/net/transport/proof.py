"""Mutual authentication of the two ends of a connection, and a key for the connection.

Both ends prove that they hold the run's token, which is never sent. Each end answers the other's
random challenge with an HMAC over both challenges and the purpose of the intended listener. This
module neither sends nor waits. `transport.links` does, with a thread for each connection, and
`sockets` and `listener`, with one thread for all connections.

    the listening end    GREETING_BYTES   protocol name, and its challenge
    the connecting end   ANSWER_BYTES     its challenge, and its proof
    the listening end    PROOF_BYTES      its proof; without it, the other end sends nothing more
"""

from __future__ import annotations

import hmac
import secrets

PROOF_S = 5.0
"""Seconds for the whole authentication."""
MAX_UNPROVEN = 256
"""Unauthenticated connections of one listener, at most. A further one replaces the oldest. Peers
that hold the token authenticate within milliseconds."""
_HELLO = b"RLXLINK1"
_CHALLENGE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(_HELLO) + _CHALLENGE_BYTES
ANSWER_BYTES = _CHALLENGE_BYTES + PROOF_BYTES


def _mac(token: bytes, sender: bytes, challenges: bytes, purpose: bytes) -> bytes:
    # The sender is part of the text, so that a proof cannot be sent back as the other end's proof.
    return hmac.digest(token, sender + challenges + purpose, "sha256")


class Challenge:
    """The listening end. For an unauthenticated peer it computes only one HMAC, of ANSWER_BYTES.

    >>> listening = Challenge(b"token", b"purpose")
    >>> connecting = ChallengeResponse(b"token", b"purpose")
    >>> proof, key = listening.check(connecting.answer(listening.greeting))
    >>> connecting.check(proof) == key
    True
    """

    __slots__ = ("_challenge", "_purpose", "_token", "greeting")

    def __init__(self, token: bytes, purpose: bytes) -> None:
        self._token, self._purpose = token, purpose
        self._challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self.greeting = _HELLO + self._challenge

    def check(self, answer: bytes) -> tuple[bytes, bytes]:
        """Proof to send, and key of the connection. ConnectionError: the peer does not hold the
        token."""
        challenges = self._challenge + answer[:_CHALLENGE_BYTES]
        proof = answer[_CHALLENGE_BYTES:]
        # In constant time, so that the duration tells nothing about the right proof.
        if not hmac.compare_digest(proof, _mac(self._token, b"reader", challenges, self._purpose)):
            raise ConnectionError("the peer has not proved that it holds the run's token")
        # Only now: a peer without the token gets no proof, which it could pass on to another
        # process.
        own_proof = _mac(self._token, b"maker", challenges, self._purpose)
        return own_proof, _mac(self._token, b"key", challenges, self._purpose)


class ChallengeResponse:
    """The connecting end."""

    __slots__ = ("_challenges", "_purpose", "_token")

    def __init__(self, token: bytes, purpose: bytes) -> None:
        self._token, self._purpose, self._challenges = token, purpose, b""

    def answer(self, greeting: bytes) -> bytes:
        """Answer to send. ConnectionError: ``greeting`` is invalid."""
        if not greeting.startswith(_HELLO):
            raise ConnectionError("the peer is not a listener of a run")
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self._challenges = greeting[len(_HELLO) :] + challenge
        return challenge + _mac(self._token, b"reader", self._challenges, self._purpose)

    def check(self, proof: bytes) -> bytes:
        """Key of the connection. ConnectionError: the listener does not hold the token."""
        if not hmac.compare_digest(
            proof, _mac(self._token, b"maker", self._challenges, self._purpose)
        ):
            raise ConnectionError("the peer has not proved that it holds the run's token")
        return _mac(self._token, b"key", self._challenges, self._purpose)
