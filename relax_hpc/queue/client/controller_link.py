"""The connection to the controller of the highest incarnation: found through the roster, and again
when it breaks."""

from __future__ import annotations

import time
from typing import Any, Protocol

from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.roster import GroupCard, latest_card
from relax_hpc.net.transport.sockets import FrameConnection, PendingConnection, Wakeup
from relax_hpc.net.transport.wire import BadMessage, controller_purpose, pack, unpack


class Sendable(Protocol):
    """A call that can be sent to the controller, also again."""

    def request(self) -> dict[str, Any]:
        """The message as of now."""


class Line:
    """Line to the controller of the highest incarnation."""

    def __init__(self, run: RunDir, token: bytes) -> None:
        self.run, self.token, self.bell = run, token, Wakeup()
        self._card: GroupCard | None = None
        self._knock: tuple[int, PendingConnection] | None = None
        """Incarnation of a controller, and a connection in the making to it."""
        self._connection: FrameConnection | None = None
        self._heard = 0.0
        self._broken = False

    def found(self, now: float, patience: float, seconds: float) -> FrameConnection | None:
        """A new connection, if there is none, or this one is silent for ``patience`` and there is a
        newer controller.

        It takes ``seconds`` at most, and goes on where it was when it is called again.
        """
        if self._connection and now - self._heard < patience:
            return None
        card = latest_card(self.run, "hub")
        if card is None or (
            self._connection and self._card and card.incarnation <= self._card.incarnation
        ):
            return None
        card.check_protocol()
        try:
            connection = self._knock_at(card, seconds).proceed(seconds)
        except OSError:
            self._knock = None
            return None
        if connection:
            self._card, self._knock = card, None
        return connection

    def _knock_at(self, card: GroupCard, seconds: float) -> PendingConnection:
        if self._knock and self._knock[0] != card.incarnation:
            self._knock[1].close()
            self._knock = None
        if not self._knock:
            self._knock = (
                card.incarnation,
                PendingConnection(
                    card.endpoint, self.token, controller_purpose(card.incarnation), seconds
                ),
            )
        return self._knock[1]

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._broken

    @property
    def grace_s(self) -> float:
        """Extra seconds beyond a call's patience while there is a connection, so that the
        controller's own words arrive."""
        return 1.0 if self._connection else 0.0

    def take(self, connection: FrameConnection) -> None:
        """Go on with ``connection``."""
        self.close()
        self._connection, self._broken, self._heard = connection, False, time.monotonic()

    def send(self, call: Sendable) -> None:
        """Send ``call`` now, or with whatever connection is found next."""
        if self._connection and not self._broken:
            try:
                self._connection.send(pack(call.request()))
            except OSError:
                self._broken = True
            if self._broken or self._connection.has_backlog:
                self.bell.ring()

    def wait(self, seconds: float) -> None:
        """Wait until there may be replies, or the bell rings, or ``seconds`` have passed."""
        self.bell.wait(None if self._broken else self._connection, seconds)

    def replies(self) -> tuple[list[dict[str, Any]], bool]:
        """Replies that have come, and whether the connection has just broken."""
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
            self._heard = time.monotonic()
        if broken := self._broken:
            self.close()
        return replies, broken

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._knock:
            self._knock[1].close()
            self._knock = None
