"""Listening end of the queue: many clients and one thread, which waits for no single client.

A new connection is in the `lobby` until its peer has authenticated. After that, a bounded number of
its frames is read in each turn. It is closed at its first invalid frame.
"""

from __future__ import annotations

import selectors
import socket

from relax_hpc.net.transport.lobby import WAITING, Lobby
from relax_hpc.net.transport.sockets import FrameConnection, endpoint_of
from relax_hpc.net.transport.wire import BadMessage, Bytes

FRAMES_A_TURN = 64
"""Frames of one peer that are read in one turn, at most."""
_IN, _OUT = selectors.EVENT_READ, selectors.EVENT_WRITE


class Listener:
    """Connections of many clients, each with a number."""

    def __init__(
        self, listening: socket.socket, token: bytes, purpose: bytes, share: float = 1.0
    ) -> None:
        """``purpose``, ``share``: see `Lobby`. `close` also closes ``listening``."""
        self.endpoint = endpoint_of(*listening.getsockname()[:2])
        self._peers: dict[int, FrameConnection] = {}
        self._unsent: set[int] = set()
        """Peers with pending output."""
        self._unread: set[int] = set()
        """Peers with more frames than one turn reads."""
        self._refused = 0
        self._selector = selectors.DefaultSelector()
        self.lobby = Lobby(listening, token, purpose, self._selector, share)

    @property
    def refused(self) -> int:
        """Number of connections that were ended for invalid data or a late proof."""
        return self._refused + self.lobby.refused

    def fileno(self) -> int:
        """Descriptor that is readable when `receive` has work to do, for an event loop.

        Frames that were received but not returned yet do not make it readable, see `has_more`.
        """
        return self._selector.fileno()

    @property
    def has_more(self) -> bool:
        """Whether more frames have arrived than one turn returns."""
        return bool(self._unread)

    def receive(self, seconds: float) -> list[tuple[int, memoryview]]:
        """Payloads with the numbers of their peers, which arrive within ``seconds``.

        A new connection also ends the wait.
        """
        # Frames that were received before do not make their sockets readable again.
        timeout = 0.0 if self._unread else self.lobby.wait_limit_s(seconds)
        ready = {key.data: events for key, events in self._selector.select(timeout)}
        has_connections = ready.pop(None, 0)
        payloads: list[tuple[int, memoryview]] = []
        for number in self._unread - ready.keys():
            ready[number] = 0
        for number, events in ready.items():
            try:
                payloads += self._read(number, events)
            except BadMessage:
                self.refuse(number)
            except OSError:
                self._drop(number)
        # Last, because a guest whose proof has arrived in this turn is not overdue.
        self.lobby.end_overdue()
        if has_connections:
            self.lobby.accept()
        return payloads

    def _read(self, number: int, events: int) -> list[tuple[int, memoryview]]:
        """Payloads of a peer; empty for a guest, which can only authenticate.

        OSError, BadMessage: the connection must be ended.
        """
        if number in self.lobby.guests:
            if authenticated := self.lobby.read_guest(number):
                connection, key = authenticated
                self._peers[number] = FrameConnection(connection, key, listens=True)
                self._selector.register(connection, _IN, number)
            return []
        peer = self._peers[number]
        if events & _OUT:
            self._flush(number)
        if events & _IN and number not in self._unread:
            peer.receive()
        payloads = peer.payloads(FRAMES_A_TURN)
        if peer.has_more:
            self._unread.add(number)
        else:
            self._unread.discard(number)
        return [(number, payload) for payload in payloads]

    def send(self, number: int, payload: Bytes) -> None:
        """Send ``payload`` to a peer. If the peer has disconnected, nothing happens."""
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
        """End a peer's connection because of an invalid message."""
        if number in self._peers:
            self._refused += 1
            self._drop(number)

    def has_peer(self, number: int) -> bool:
        """Whether a peer is connected."""
        return number in self._peers

    def _drop(self, number: int) -> None:
        peer = self._peers.pop(number, None)
        self._unsent.discard(number)
        self._unread.discard(number)
        if peer is not None:
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def close(self) -> None:
        """End all connections."""
        for number in list(self._peers):
            self._drop(number)
        self.lobby.close()
        self._selector.close()


def create_listening_socket(host: str) -> socket.socket:
    """A socket that listens at ``host``, an address of this node, on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=WAITING)
