"""Lobby for peers that have connected and proven nothing yet, at a listening end with one thread
for all of them.

Anybody who reaches the port can connect. What that may cost is bounded at every turn: so many
connections are accepted, so many are there that have not proven that they hold the run's token, for
so long, each of which is read and hashed one answer of fixed length.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import time
from collections.abc import Callable

from relax_hpc.net.rendezvous.open_files import connection_limit
from relax_hpc.net.transport.proof import ANSWER_BYTES, MAX_UNPROVEN, PROOF_S, Challenge

WAITING = 1024
"""Length of the queue of connections that have not been accepted yet."""
ACCEPTED_A_TURN = 16
"""Connections accepted in a turn, fewer than may be unproven: a peer has some turns to answer,
however many come."""
_REST_S = 1.0
"""Seconds between two tries to accept a connection when there is no room for one."""
_LONGEST_S = 3600.0
"""Longest wait that selectors take, seconds."""


class Guest:
    """Peer that has connected, and has proven nothing yet."""

    __slots__ = ("_answer", "_challenge", "socket", "until")

    def __init__(self, made: socket.socket, token: bytes, purpose: bytes) -> None:
        """Greet a peer. OSError: it has gone already."""
        made.setblocking(False)
        self.socket, self._challenge, self._answer = made, Challenge(token, purpose), bytearray()
        self.until = time.monotonic() + PROOF_S
        # Whose system does not take even this at once will not answer it.
        made.send(self._challenge.greeting)

    def receive(self) -> bytes | None:
        """The connection's key, once the proof has come. OSError: it has gone; ConnectionError:
        that is no proof."""
        try:
            data = self.socket.recv(ANSWER_BYTES - len(self._answer))
        except (BlockingIOError, InterruptedError):
            return None
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        self._answer += data
        if len(self._answer) < ANSWER_BYTES:
            return None
        proof, key = self._challenge.check(bytes(self._answer))
        self.socket.send(proof)
        return key


class Lobby:
    """The guests of a listening socket, told apart by numbers.

    They are registered with ``selector`` by their numbers, the listening socket by None.
    """

    def __init__(
        self,
        listening: socket.socket,
        token: bytes,
        purpose: bytes,
        selector: selectors.BaseSelector,
        share: float = 1.0,
        check: Callable[[socket.socket], None] = lambda _: None,
    ) -> None:
        """``purpose``: what guests must mean, see `proof`; ``share``: of the time of this process,
        if that has other things to do, what accepting may take; ``check``: OSError for who need not
        even be asked."""
        self._listening, self._token, self._purpose, self._check = listening, token, purpose, check
        self._selector, self._rests = selector, 1.0 / share - 1.0
        self.refused = 0
        """Connections that were ended for what they sent, or did not prove in time."""
        self.guests: dict[int, Guest] = {}
        """Guests by number, those that came first at first."""
        self._limit = connection_limit()
        self._numbers = itertools.count(1)
        self._rests_until = 0.0
        listening.setblocking(False)
        listening.listen(WAITING)
        selector.register(listening, selectors.EVENT_READ)

    def wait_limit_s(self, seconds: float = _LONGEST_S) -> float:
        """Seconds to wait at most, of ``seconds``; a lobby that had to rest accepts again."""
        now = time.monotonic()
        if self._rests_until and now >= self._rests_until:
            self._rests_until = 0.0
            self._selector.register(self._listening, selectors.EVENT_READ)
        ends = [next(iter(self.guests.values())).until] if self.guests else []
        ends += [self._rests_until] if self._rests_until else []
        return max(0.0, min([now + seconds, *ends]) - now)

    def read_guest(self, number: int) -> tuple[socket.socket, bytes] | None:
        """Connection of a guest and its key, once it has proven itself: it is no guest any more.
        None before."""
        guest = self.guests[number]
        try:
            key = guest.receive()
        except OSError as error:
            # The plain one is said of a wrong proof.
            self.refused += type(error) is ConnectionError
            self._turn_away(number)
            return None
        if key is None:
            return None
        del self.guests[number]
        self._selector.unregister(guest.socket)
        return guest.socket, key

    def accept(self) -> None:
        """Let some of those in that wait to be accepted."""
        began = time.thread_time()
        for _ in range(ACCEPTED_A_TURN):
            try:
                made, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                break
            except OSError:
                # Too many files are open: who wants in waits, and so does this loop.
                return self._rest(_REST_S)
            self._welcome(made)
        if self._rests:
            self._rest(self._rests * (time.thread_time() - began))

    def _rest(self, seconds: float) -> None:
        self._selector.unregister(self._listening)
        self._rests_until = time.monotonic() + seconds

    def _welcome(self, made: socket.socket) -> None:
        """Let ``made`` prove itself, in the place of the oldest that has not if there is no room.

        Where files are few the oldest makes room for the next that comes: this one has a file that
        is to be left.
        """
        crowded = made.fileno() >= self._limit
        if self.guests and (crowded or len(self.guests) >= MAX_UNPROVEN):
            self._turn_away(next(iter(self.guests)))
        if crowded:
            made.close()
            return
        try:
            self._check(made)
            guest = Guest(made, self._token, self._purpose)
        except OSError:
            made.close()
            return
        number = next(self._numbers)
        self.guests[number] = guest
        self._selector.register(made, selectors.EVENT_READ, number)

    def end_overdue(self) -> None:
        """Turn away guests that have not proven themselves in time."""
        now = time.monotonic()
        while self.guests and (first := next(iter(self.guests.items())))[1].until <= now:
            self.refused += 1
            self._turn_away(first[0])

    def _turn_away(self, number: int) -> None:
        gone = self.guests.pop(number)
        self._selector.unregister(gone.socket)
        gone.socket.close()

    def close(self) -> None:
        """End all that are here, and listen no more."""
        for number in list(self.guests):
            self._turn_away(number)
        if not self._rests_until:
            self._selector.unregister(self._listening)
        self._listening.close()
