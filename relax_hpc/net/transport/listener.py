"""The listening end of the queue: many clients and one thread, which waits for none of them.

Whoever connects is in the `lobby` until it has proven itself. Then it is read a bounded number of
frames a turn, and goes with the first bad one.
"""

from __future__ import annotations

import selectors
import socket

from relax_hpc.net.transport.lobby import WAITING, Lobby
from relax_hpc.net.transport.sockets import FrameConnection, endpoint_of
from relax_hpc.net.transport.wire import BadMessage, Bytes

FRAMES_A_TURN = 64
"""Frames of one peer that are read in a turn, at most."""
_IN, _OUT = selectors.EVENT_READ, selectors.EVENT_WRITE


class Listener:
    """Connections of many clients, told apart by numbers."""

    def __init__(
        self, listening: socket.socket, token: bytes, purpose: bytes, share: float = 1.0
    ) -> None:
        """``purpose``, ``share``: see `Lobby`. ``listening`` is closed with this."""
        self.endpoint = endpoint_of(*listening.getsockname()[:2])
        self._peers: dict[int, FrameConnection] = {}
        self._unsent: set[int] = set()
        """Peers that have not taken all that they were sent."""
        self._unread: set[int] = set()
        """Peers of whom more frames have come than were read in a turn."""
        self._refused = 0
        self._selector = selectors.DefaultSelector()
        self.lobby = Lobby(listening, token, purpose, self._selector, share)

    @property
    def refused(self) -> int:
        """Connections that were ended for what they sent, or did not prove in time."""
        return self._refused + self.lobby.refused

    def fileno(self) -> int:
        """Descriptor that is readable when `receive` has something to do, for who waits for others
        too; what was read and not given yet (`has_more`) does not show there."""
        return self._selector.fileno()

    @property
    def has_more(self) -> bool:
        """Whether more frames have come than were given in a turn."""
        return bool(self._unread)

    def receive(self, seconds: float) -> list[tuple[int, memoryview]]:
        """Payloads that have come, by peer, or come within ``seconds``; a new connection ends the
        wait too."""
        patience = self.lobby.wait_limit_s(seconds)
        ready = {
            key.data: events
            for key, events in self._selector.select(0.0 if self._unread else patience)
        }
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
        self.lobby.end_overdue()
        if accepts:
            self.lobby.accept()
        return found

    def _hear(self, number: int, events: int) -> list[tuple[int, memoryview]]:
        """Payloads of a peer; of a guest only that it is one. OSError, BadMessage: it is to go."""
        if number in self.lobby.guests:
            if known := self.lobby.read_guest(number):
                self._peers[number] = FrameConnection(*known, listens=True)
                self._selector.register(known[0], _IN, number)
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
        """Send to a peer; nothing if it has gone."""
        peer = self._peers.get(number)
        if peer is None:
            return
        try:
            peer.send(payload)
        except OSError:
            self._drop(number)
            return
        if peer.has_backlog and number not in self._unsent:
            self._unsent.add(number)
            self._selector.modify(peer.socket, _IN | _OUT, number)

    def _flush(self, number: int) -> None:
        peer = self._peers[number]
        peer.flush()
        if not peer.has_backlog:
            self._unsent.discard(number)
            self._selector.modify(peer.socket, _IN, number)

    def refuse(self, number: int) -> None:
        """End a peer's connection for what it has sent."""
        if number in self._peers:
            self._refused += 1
            self._drop(number)

    def has_peer(self, number: int) -> bool:
        """Whether a peer is there still."""
        return number in self._peers

    def _drop(self, number: int) -> None:
        gone = self._peers.pop(number, None)
        self._unsent.discard(number)
        self._unread.discard(number)
        if gone is not None:
            self._selector.unregister(gone.socket)
            gone.socket.close()

    def close(self) -> None:
        """End all connections."""
        for number in list(self._peers):
            self._drop(number)
        self.lobby.close()
        self._selector.close()


def create_listening_socket(host: str) -> socket.socket:
    """A socket that listens at ``host``, an address of this node, at a port of its own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=WAITING)
