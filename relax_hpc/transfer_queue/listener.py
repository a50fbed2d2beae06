"""The listening end of the queue: many clients and one thread, which waits for none of them.

Anybody who reaches the port can connect. What that may cost is bounded at every turn: so many connections are accepted,
so many are there that have not proven that they hold the run's token, for so long, each of which is read and hashed
one answer of fixed length. Whoever has proven itself is read a bounded number of frames, and goes with the first bad
one.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import time

from relax_hpc.rendezvous.open_files import connection_limit
from relax_hpc.transfer_queue.proof import ANSWER_BYTES, MAX_UNPROVEN, PROOF_S, Challenge
from relax_hpc.transfer_queue.sockets import Connection
from relax_hpc.transfer_queue.wire import BadMessage, Bytes

_WAITING = 1024
"""Connections that have not been accepted yet."""
_REST_S = 1.0
"""Between two tries to accept a connection when there is no room for one."""
ACCEPTED_A_TURN = 16
"""Much fewer than may be unproven: who was accepted has some turns to answer, however many come."""
FRAMES_A_TURN = 64
"""Of one peer."""
_IN, _OUT = selectors.EVENT_READ, selectors.EVENT_WRITE


class Guest:
    """Who has connected, and has proven nothing yet."""

    __slots__ = ("_answer", "_challenge", "socket", "until")

    def __init__(self, made: socket.socket, token: bytes, purpose: bytes) -> None:
        """OSError: it has gone already."""
        made.setblocking(False)
        self.socket, self._challenge, self._answer = made, Challenge(token, purpose), bytearray()
        self.until = time.monotonic() + PROOF_S
        # Whose system does not take even this at once will not answer it.
        made.send(self._challenge.greeting)

    def receive(self) -> Connection | None:
        """The connection, once the proof has come. OSError: it has gone; BadMessage: that is no proof."""
        try:
            data = self.socket.recv(ANSWER_BYTES - len(self._answer))
        except (BlockingIOError, InterruptedError):
            return None
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        self._answer += data
        if len(self._answer) < ANSWER_BYTES:
            return None
        try:
            proof, key = self._challenge.check(bytes(self._answer))
        except ConnectionError as error:
            raise BadMessage(str(error)) from error
        self.socket.send(proof)
        return Connection(self.socket, key, listens=True)


class Listener:
    """Connections of many clients, told apart by numbers."""

    def __init__(self, host: str, token: bytes, purpose: bytes) -> None:
        """``purpose``: what clients must mean, see `proof`."""
        self._token, self._purpose = token, purpose
        self._socket = socket.create_server((host, 0), family=_family(host), backlog=_WAITING)
        self._socket.setblocking(False)
        self.endpoint = f"tcp://{_bracketed(host)}:{self._socket.getsockname()[1]}"
        self.refused = 0
        """Connections that were ended for what they sent, or did not prove in time."""
        self._limit = connection_limit()
        self._numbers = itertools.count(1)
        self._guests: dict[int, Guest] = {}
        """Those that came first at first."""
        self._peers: dict[int, Connection] = {}
        self._unsent: set[int] = set()
        """Peers that have not taken all that they were sent."""
        self._unread: set[int] = set()
        """Peers of whom more frames have come than were read in a turn."""
        self._rests_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, _IN)

    def receive(self, seconds: float) -> list[tuple[int, memoryview]]:
        """What has come, by peer, or comes within ``seconds``; a new connection ends the wait too."""
        ready = {key.data: events for key, events in self._selector.select(self._patience(seconds))}
        accepts, found = ready.pop(None, 0), []
        for number in self._unread - ready.keys():
            ready[number] = 0
        for number, events in ready.items():
            try:
                found += self._hear(number, events)
            except BadMessage:
                self.refuse(number)
            except OSError:
                self._drop(number)
        # Who has just proven itself has done so before others come and those who have not must go.
        self._end_overdue()
        if accepts:
            self._accept()
        return found

    def _patience(self, seconds: float) -> float:
        """How long to wait at most; who had no room is let in again after a rest."""
        now = time.monotonic()
        if self._rests_until and now >= self._rests_until:
            self._rests_until = 0.0
            self._selector.register(self._socket, _IN)
        ends = [next(iter(self._guests.values())).until] if self._guests else []
        ends += [self._rests_until] if self._rests_until else []
        return 0.0 if self._unread else max(0.0, min([now + seconds, *ends]) - now)

    def _hear(self, number: int, events: int) -> list[tuple[int, memoryview]]:
        """What a peer says; of a guest at most that it is one. OSError, BadMessage: it is to go."""
        if guest := self._guests.get(number):
            if made := guest.receive():
                del self._guests[number]
                self._peers[number] = made
            return []
        peer = self._peers[number]
        if events & _OUT:
            self._flush(number)
        if events & _IN and number not in self._unread:
            peer.receive()
        payloads = peer.payloads(FRAMES_A_TURN)
        (self._unread.add if peer.has_more else self._unread.discard)(number)
        return [(number, payload) for payload in payloads]

    def send(self, number: int, payload: Bytes) -> None:
        """To a peer; nothing if it has gone."""
        peer = self._peers.get(number)
        if peer is None:
            return
        try:
            peer.send(payload)
        except OSError:
            self._drop(number)
            return
        if peer.waits and number not in self._unsent:
            self._unsent.add(number)
            self._selector.modify(peer.socket, _IN | _OUT, number)

    def _flush(self, number: int) -> None:
        peer = self._peers[number]
        peer.flush()
        if not peer.waits:
            self._unsent.discard(number)
            self._selector.modify(peer.socket, _IN, number)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_A_TURN):
            try:
                made, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                # Too many files are open: who wants in waits, and so does this loop.
                self._selector.unregister(self._socket)
                self._rests_until = time.monotonic() + _REST_S
                return
            self._welcome(made)

    def _welcome(self, made: socket.socket) -> None:
        """Let ``made`` prove itself, in the place of the oldest that has not if there is no room.

        Where files are few the oldest makes room for the next that comes: this one has a file that is to be left.
        """
        crowded = made.fileno() >= self._limit
        if self._guests and (crowded or len(self._guests) >= MAX_UNPROVEN):
            self._drop(next(iter(self._guests)))
        if crowded:
            made.close()
            return
        try:
            guest = Guest(made, self._token, self._purpose)
        except OSError:
            made.close()
            return
        number = next(self._numbers)
        self._guests[number] = guest
        self._selector.register(made, _IN, number)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        while self._guests and (first := next(iter(self._guests.items())))[1].until <= now:
            self.refuse(first[0])

    def refuse(self, number: int) -> None:
        """End a connection for what it has sent."""
        if number in self._guests or number in self._peers:
            self.refused += 1
            self._drop(number)

    def _drop(self, number: int) -> None:
        gone = self._guests.pop(number, None) or self._peers.pop(number, None)
        self._unsent.discard(number)
        self._unread.discard(number)
        if gone is not None:
            self._selector.unregister(gone.socket)
            gone.socket.close()

    def close(self) -> None:
        """End all connections."""
        for number in [*self._guests, *self._peers]:
            self._drop(number)
        self._selector.close()
        self._socket.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
