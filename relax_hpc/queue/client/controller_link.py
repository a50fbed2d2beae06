"""The connection to the controller of the highest incarnation, found through the roster. It is
replaced when it breaks."""

from __future__ import annotations

import time
from typing import Any, Protocol

from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.roster import GroupCard, latest_card
from relax_hpc.net.transport.sockets import FrameConnection, PendingConnection, Wakeup
from relax_hpc.net.transport.wire import BadMessage, controller_purpose, pack, unpack


class Sendable(Protocol):
    """A call that can be sent to the controller several times."""

    def request(self) -> dict[str, Any]:
        """The message, as of now."""


class ControllerLink:
    """Connection to the controller of the highest incarnation."""

    def __init__(self, run: RunDir, token: bytes) -> None:
        self.run, self.token, self.wakeup = run, token, Wakeup()
        self._card: GroupCard | None = None
        self._pending: tuple[int, PendingConnection] | None = None
        """Incarnation of a controller, and a connection to it that is not established yet."""
        self._connection: FrameConnection | None = None
        self._received_at = 0.0
        self._broken = False

    def find_connection(
        self, now: float, patience_s: float, seconds: float
    ) -> FrameConnection | None:
        """A new connection, if none exists, or if the present one is silent for ``patience_s``
        and there is a newer controller.

        A call takes at most ``seconds``. The next call continues to establish the same connection.
        """
        if self._connection and now - self._received_at < patience_s:
            return None
        card = latest_card(self.run, "hub")
        if card is None:
            return None
        if self._connection and self._card and card.incarnation <= self._card.incarnation:
            return None
        card.check_protocol()
        try:
            connection = self._connect(card, seconds).proceed(seconds)
        except OSError:
            self._pending = None
            return None
        if connection:
            self._card, self._pending = card, None
        return connection

    def _connect(self, card: GroupCard, seconds: float) -> PendingConnection:
        """The pending connection to the controller of ``card``, new if none exists."""
        if self._pending and self._pending[0] != card.incarnation:
            self._pending[1].close()
            self._pending = None
        if not self._pending:
            purpose = controller_purpose(card.incarnation)
            pending = PendingConnection(card.endpoint, self.token, purpose, seconds)
            self._pending = card.incarnation, pending
        return self._pending[1]

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._broken

    @property
    def grace_s(self) -> float:
        """Seconds that a call waits beyond its deadline while there is a connection, so that the
        controller's own error message arrives."""
        return 1.0 if self._connection else 0.0

    def use(self, connection: FrameConnection) -> None:
        """Replace the present connection by ``connection``."""
        self.close()
        self._connection, self._broken = connection, False
        self._received_at = time.monotonic()

    def send(self, call: Sendable) -> None:
        """Send ``call`` now. Without a working connection, nothing is sent: the next connection
        sends all calls."""
        if self._connection and not self._broken:
            try:
                self._connection.send(pack(call.request()))
            except OSError:
                self._broken = True
            if self._broken or self._connection.has_backlog:
                self.wakeup.ring()

    def wait(self, seconds: float) -> None:
        """Wait until a reply may have arrived, `wakeup` rings, or ``seconds`` have passed."""
        self.wakeup.wait(None if self._broken else self._connection, seconds)

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Replies that have arrived, and whether the connection broke."""
        replies: list[dict[str, Any]] = []
        if self._connection is None:
            return replies, False
        try:
            self._connection.flush()
            if not self._broken:
                self._connection.receive()
                replies = [unpack(payload) for payload in self._connection.payloads()]
        except (OSError, BadMessage):
            self._broken = True
        if replies:
            self._received_at = time.monotonic()
        broken = self._broken
        if broken:
            self.close()
        return replies, broken

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._pending:
            self._pending[1].close()
            self._pending = None
