"""The reader's side of connections: one to each peer, kept, and given up at the first failure."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from relax_hpc.net.transport.links import CLOSE_S, CONNECT_S, Deadline


class PeerLink:
    """One connection to a peer, made when it is first needed, used by one thread at a time, given
    up at any failure.

    Bytes that come after a deadline has passed come to nobody.
    """

    def __init__(self, connect: Callable[[Deadline], socket.socket]) -> None:
        self.gone = False
        self._connect = connect
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    @contextlib.contextmanager
    def use(self, deadline: Deadline) -> Iterator[socket.socket]:
        """The connection, for this thread alone. An OSError if it cannot be had in time."""
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise TimeoutError(f"other reads from the same peer took all of {deadline.seconds:g} s")
        try:
            if not self.gone and self._connection is None:
                self._connection = self._connect(deadline.shortened(CONNECT_S))
            if self.gone or self._connection is None:
                raise ConnectionError("the connection was lost")
            yield self._connection
        except BaseException:
            self._give_up()
            raise
        finally:
            self._lock.release()

    def _give_up(self) -> None:
        self.gone = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def is_dead(self) -> bool:
        """Whether the link is given up, or idle with nobody at the other end."""
        if self.gone or self._connection is None or not self._lock.acquire(blocking=False):
            return self.gone
        try:
            return self._connection is None or _is_readable(self._connection)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give the link up, whoever uses it."""
        self.gone = True
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(timeout=CLOSE_S):
            self._give_up()
            self._lock.release()


def _is_readable(connection: socket.socket) -> bool:
    """Whether an idle connection is of no use: the peer has closed it, or says what nobody asked
    for."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


_Link = TypeVar("_Link", bound=PeerLink)
_Address = TypeVar("_Address", bound=Hashable)


class PeerLinks(Generic[_Address, _Link]):
    """The links to all peers by address. Those of peers that have ended are dropped when a new one
    is made."""

    def __init__(self, make: Callable[[_Address], _Link]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._links: dict[_Address, _Link] = {}
        self._closed = False

    def link(self, address: _Address) -> _Link:
        """Link to ``address``; ConnectionError once closed."""
        link = self._links.get(address)
        if link is not None and not link.gone:
            return link
        with self._lock:
            if self._closed:
                raise ConnectionError("this plane is closed")
            for other in [other for other, link in self._links.items() if link.is_dead()]:
                self._links.pop(other).close()
            return self._links.setdefault(address, self._make(address))

    def close(self) -> None:
        """Close every link; there will be no more."""
        with self._lock:
            self._closed = True
            for link in self._links.values():
                link.close()
            self._links.clear()
