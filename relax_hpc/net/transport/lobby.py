"""Lobby: peers of a listening socket that have not authenticated yet, all in one thread.

Every user who reaches the port can connect. The lobby bounds the cost: connections accepted in a
turn, unauthenticated connections, and the seconds of each. From each, one answer of fixed length is
read and hashed.
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
"""Length of the kernel's queue of connections that were not accepted yet."""
ACCEPTED_A_TURN = 16
"""Connections accepted in a turn. It is less than MAX_UNPROVEN, so that a peer has several turns to
answer, also in a flood of connections."""
_REST_S = 1.0
"""Seconds between two attempts to accept a connection when no file descriptor is free."""
_LONGEST_S = 3600.0
"""Longest wait, in seconds. Selectors do not accept infinity."""


class Guest:
    """A peer that has connected but not authenticated."""

    __slots__ = ("_answer", "_challenge", "socket", "until")

    def __init__(self, connection: socket.socket, token: bytes, purpose: bytes) -> None:
        """Send the greeting. OSError: the peer has disconnected."""
        connection.setblocking(False)
        self.socket = connection
        self._challenge, self._answer = Challenge(token, purpose), bytearray()
        self.until = time.monotonic() + PROOF_S
        # The greeting fits into the empty send buffer. If the kernel does not take it immediately,
        # the peer is broken.
        connection.send(self._challenge.greeting)

    def receive(self) -> bytes | None:
        """Key of the connection, once the proof has arrived; None before.

        OSError: the peer has disconnected. ConnectionError: its proof is wrong.
        """
        # Not more than the answer: bytes after it belong to the first frame.
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
    """The guests of a listening socket, each with a number.

    They are registered with ``selector`` under their numbers, the listening socket under None.
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
        """Listen.

        Args:
            listening: socket, which the lobby closes.
            token: secret of the run.
            purpose: name of the listener that guests must intend, see `proof`.
            selector: of the caller's loop.
            share: share of this process's time that accepting takes, at most.
            check: raises OSError for connections that are refused without authentication.
        """
        self._listening, self._token, self._purpose, self._check = listening, token, purpose, check
        self._selector, self._rests = selector, 1.0 / share - 1.0
        self.refused = 0
        """Number of connections that were ended for a wrong or a late proof."""
        self.guests: dict[int, Guest] = {}
        """Guests by number, the oldest first."""
        self._limit = connection_limit()
        self._numbers = itertools.count(1)
        self._rests_until = 0.0
        listening.setblocking(False)
        # The kernel limits the length of the queue to net.core.somaxconn.
        listening.listen(WAITING)
        selector.register(listening, selectors.EVENT_READ)

    def wait_limit_s(self, seconds: float = _LONGEST_S) -> float:
        """Seconds to wait, at most ``seconds``. After a rest, the lobby accepts again."""
        now = time.monotonic()
        if self._rests_until and now >= self._rests_until:
            self._rests_until = 0.0
            self._selector.register(self._listening, selectors.EVENT_READ)
        ends = [next(iter(self.guests.values())).until] if self.guests else []
        ends += [self._rests_until] if self._rests_until else []
        return max(0.0, min([now + seconds, *ends]) - now)

    def read_guest(self, number: int) -> tuple[socket.socket, bytes] | None:
        """Connection and key of a guest, once it has authenticated; it is then no longer a guest.

        None: it has not authenticated.
        """
        guest = self.guests[number]
        try:
            key = guest.receive()
        except OSError as error:
            # ConnectionError itself means a wrong proof. Its subclasses mean a lost connection.
            self.refused += type(error) is ConnectionError
            self._remove(number)
            return None
        if key is None:
            return None
        del self.guests[number]
        self._selector.unregister(guest.socket)
        return guest.socket, key

    def accept(self) -> None:
        """Accept up to ACCEPTED_A_TURN connections."""
        began = time.thread_time()
        for _ in range(ACCEPTED_A_TURN):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                break
            except OSError:
                # EMFILE or ENFILE: too many open files. Connections wait in the kernel's queue.
                return self._rest(_REST_S)
            self._add_guest(connection)
        if self._rests:
            self._rest(self._rests * (time.thread_time() - began))

    def _rest(self, seconds: float) -> None:
        self._selector.unregister(self._listening)
        self._rests_until = time.monotonic() + seconds

    def _add_guest(self, connection: socket.socket) -> None:
        """Make the peer a guest. If there are too many guests, the oldest one is removed.

        If file descriptors are scarce, the new connection is closed too, because its descriptor is
        reserved.
        """
        is_reserved = connection.fileno() >= self._limit
        if self.guests and (is_reserved or len(self.guests) >= MAX_UNPROVEN):
            self._remove(next(iter(self.guests)))
        if is_reserved:
            connection.close()
            return
        try:
            self._check(connection)
            guest = Guest(connection, self._token, self._purpose)
        except OSError:
            connection.close()
            return
        number = next(self._numbers)
        self.guests[number] = guest
        self._selector.register(connection, selectors.EVENT_READ, number)

    def end_overdue(self) -> None:
        """Remove guests that have not authenticated in time."""
        now = time.monotonic()
        while self.guests:
            # All guests have the same time limit, so the oldest one is the first that is overdue.
            number, guest = next(iter(self.guests.items()))
            if guest.until > now:
                return
            self.refused += 1
            self._remove(number)

    def _remove(self, number: int) -> None:
        guest = self.guests.pop(number)
        self._selector.unregister(guest.socket)
        guest.socket.close()

    def close(self) -> None:
        """End all connections of guests, and stop listening."""
        for number in list(self.guests):
            self._remove(number)
        if not self._rests_until:
            self._selector.unregister(self._listening)
        self._listening.close()
