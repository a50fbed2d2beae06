"""Connections of a reader: one to each peer, which is kept, and closed at its first failure."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from relax_hpc.net.transport.links import CLOSE_S, CONNECT_S, Deadline


class PeerLink:
    """One connection to a peer, opened at its first use. One thread at a time uses it.

    After any failure it is closed and not opened again, because late bytes of a failed read would
    otherwise be taken for an answer to the next one.
    """

    def __init__(self, connect: Callable[[Deadline], socket.socket]) -> None:
        self.is_closed = False
        self._connect = connect
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    @contextlib.contextmanager
    def use(self, deadline: Deadline) -> Iterator[socket.socket]:
        """The connection, for exclusive use. OSError: it is not available in time."""
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise TimeoutError(f"other reads from the same peer took all of {deadline.seconds:g} s")
        try:
            if not self.is_closed and self._connection is None:
                self._connection = self._connect(deadline.shortened(CONNECT_S))
            if self.is_closed or self._connection is None:
                raise ConnectionError("the connection was lost")
            yield self._connection
        except BaseException:
            self._drop()
            raise
        finally:
            self._lock.release()

    def _drop(self) -> None:
        self.is_closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def is_dead(self) -> bool:
        """Whether the link is closed, or idle and its peer has disconnected."""
        if self.is_closed or self._connection is None or not self._lock.acquire(blocking=False):
            return self.is_closed
        try:
            return self._connection is None or _is_readable(self._connection)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the link, also while another thread uses it."""
        self.is_closed = True
        connection = self._connection
        if connection is not None:
            # shutdown(2) makes a thread that uses the connection fail, so that it releases the
            # lock.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(timeout=CLOSE_S):
            self._drop()
            self._lock.release()


def _is_readable(connection: socket.socket) -> bool:
    """Whether an idle connection has data, which means that the peer has closed it or has sent
    unexpected bytes."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


_Link = TypeVar("_Link", bound=PeerLink)
_Address = TypeVar("_Address", bound=Hashable)


class PeerLinks(Generic[_Address, _Link]):
    """The links to all peers, by address. A new link removes the links of peers that have ended."""

    def __init__(self, make: Callable[[_Address], _Link]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._links: dict[_Address, _Link] = {}
        self._closed = False

    def link(self, address: _Address) -> _Link:
        """Link to ``address``. ConnectionError: this object is closed."""
        link = self._links.get(address)
        if link is not None and not link.is_closed:
            return link
        with self._lock:
            if self._closed:
                raise ConnectionError("this plane is closed")
            dead = [peer for peer, other in self._links.items() if other.is_dead()]
            for peer in dead:
                self._links.pop(peer).close()
            return self._links.setdefault(address, self._make(address))

    def close(self) -> None:
        """Close all links. No further link is created."""
        with self._lock:
            self._closed = True
            for link in self._links.values():
                link.close()
            self._links.clear()
