"""Frames over TCP: a length and as many bytes. One side listens to many, in one thread; the other has one connection.

Plain sockets, without the threads that a messaging library has at each end: `tools/bench/queue`, rows `latency` and
`control`, shows what a request costs.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from relax_hpc.transfer_queue.wire import MAX_MESSAGE_BYTES, BadMessage

_SIZE = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18
MAX_STRANGE_BYTES = 64 << 10
"""Of a frame from a peer that has not shown yet that it holds the run's token."""
_MAX_BACKLOG_BYTES = 8 * MAX_MESSAGE_BYTES
"""Of a peer that does not read what it is sent: it is not spoken to any more."""
_SILENT_S = 60
"""After which the system asks whether the other end is still there."""
_WAITING = 1024
"""Connections that have not been accepted yet."""
_REST_S = 1.0
"""Between two tries to accept a connection when there is no room for one."""
_IN, _OUT = selectors.EVENT_READ, selectors.EVENT_WRITE
Frame = bytes | bytearray
Vouch = Callable[[Frame], bool]


def framed(content: Frame) -> bytes:
    """``content`` as it is sent."""
    return _SIZE.pack(len(content)) + content


class Cutter:
    """Cuts what comes into frames.

    >>> cutter = Cutter()
    >>> cutter.of(framed(b"one") + framed(b"two")[:5]), cutter.of(framed(b"two")[5:])
    ([bytearray(b'one')], [bytearray(b'two')])
    """

    __slots__ = ("_rest", "_vouch")

    def __init__(self, vouch: Vouch | None = None) -> None:
        """With ``vouch`` frames are short until it says of one that who sent it may send longer ones."""
        self._rest, self._vouch = bytearray(), vouch

    def of(self, data: bytes) -> list[bytearray]:
        """The frames that ``data`` completes. BadMessage: one is longer than allowed, and nothing can follow."""
        rest, frames, at = self._rest, [], 0
        rest += data
        while len(rest) >= (begin := at + _SIZE.size):
            (size,) = _SIZE.unpack_from(rest, at)
            if size > (limit := MAX_STRANGE_BYTES if self._vouch else MAX_MESSAGE_BYTES):
                raise BadMessage(f"frame of {size} bytes, allowed {limit}")
            if len(rest) < begin + size:
                break
            at = begin + size
            frames.append(rest[begin:at])
            if self._vouch and self._vouch(frames[-1]):
                self._vouch = None
        del rest[:at]
        return frames


class Connection:
    """A stream socket that nobody waits for: what cannot be sent at once is kept."""

    __slots__ = ("_backlog", "_cutter", "socket")

    def __init__(self, made: socket.socket, vouch: Vouch | None = None) -> None:
        """``vouch``: see `Cutter`."""
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
        self.socket, self._backlog, self._cutter = made, bytearray(), Cutter(vouch)

    def send(self, content: Frame) -> None:
        """OSError: it is broken, or its other end does not read."""
        if self._backlog:
            self._backlog += framed(content)
            self.flush()
        elif (sent := self._sent(data := framed(content))) < len(data):
            self._backlog += memoryview(data)[sent:]
        if len(self._backlog) > _MAX_BACKLOG_BYTES:
            raise BlockingIOError(f"{len(self._backlog)} bytes were sent and not read")

    def flush(self) -> None:
        """Send what can be sent now of what was kept. OSError: it is broken."""
        while self._backlog and (sent := self._sent(self._backlog)):
            del self._backlog[:sent]

    @property
    def waits(self) -> bool:
        """Whether something is kept that could not be sent yet."""
        return bool(self._backlog)

    def receive(self) -> list[bytearray]:
        """The frames that are there now. OSError: it is broken, or has ended; BadMessage: no frames come."""
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        return self._cutter.of(data)

    def _sent(self, data: Frame) -> int:
        try:
            return self.socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def close(self) -> None:
        self.socket.close()


class Listener:
    """Connections of many clients, told apart by numbers; nothing here waits for one of them."""

    def __init__(self, host: str, vouch: Vouch | None = None) -> None:
        """``vouch``: see `Cutter`."""
        self._vouch = vouch
        self._socket = socket.create_server((host, 0), family=_family(host), backlog=_WAITING)
        self._socket.setblocking(False)
        self.endpoint = f"tcp://{_bracketed(host)}:{self._socket.getsockname()[1]}"
        self._numbers = itertools.count(1)
        self._peers: dict[int, Connection] = {}
        self._unsent: set[int] = set()
        """Peers that have not taken all that they were sent."""
        self._rests_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, _IN)

    def receive(self, seconds: float) -> list[tuple[int, bytearray]]:
        """What has come, by peer, or comes within ``seconds``; a new connection ends the wait too.

        Where something else than frames came the connection is ended, and an empty frame stands for it.
        """
        frames: list[tuple[int, bytearray]] = []
        if self._rests_until and time.monotonic() >= self._rests_until:
            self._rests_until = 0.0
            self._selector.register(self._socket, _IN)
        for key, events in self._selector.select(min(seconds, _REST_S) if self._rests_until else seconds):
            if key.data is None:
                self._accept()
                continue
            try:
                if events & _OUT:
                    self._flush(key.data)
                if events & _IN:
                    frames += [(key.data, frame) for frame in self._peers[key.data].receive()]
            except BadMessage:
                frames.append((key.data, bytearray()))
                self._drop(key.data)
            except OSError:
                self._drop(key.data)
        return frames

    def send(self, number: int, content: Frame) -> None:
        """To a peer; nothing if it has gone."""
        peer = self._peers.get(number)
        if peer is None:
            return
        try:
            peer.send(content)
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
        try:
            made, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:
            # Too many files are open: who wants in waits, and so does this loop.
            self._selector.unregister(self._socket)
            self._rests_until = time.monotonic() + _REST_S
            return
        number = next(self._numbers)
        self._peers[number] = Connection(made, self._vouch)
        self._selector.register(made, _IN, number)

    def _drop(self, number: int) -> None:
        peer = self._peers.pop(number, None)
        self._unsent.discard(number)
        if peer is not None:
            self._selector.unregister(peer.socket)
            peer.close()

    def close(self) -> None:
        """End all connections."""
        for number in list(self._peers):
            self._drop(number)
        self._selector.close()
        self._socket.close()


def connect(endpoint: str, seconds: float) -> Connection:
    """A connection to ``endpoint`` (tcp://host:port). OSError: nobody listens there, or accepts within ``seconds``."""
    place = urlsplit(endpoint)
    return Connection(socket.create_connection((place.hostname, place.port), seconds))


def wake(endpoint: str, seconds: float) -> None:
    """Have who listens there look up from waiting, if anybody does."""
    with contextlib.suppress(OSError):
        connect(endpoint, seconds).close()


class Bell:
    """Wakes a thread that waits for a connection."""

    def __init__(self) -> None:
        self._hammer, self._ear = socket.socketpair()
        for end in (self._hammer, self._ear):
            end.setblocking(False)

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            self._hammer.send(b"!")

    def wait(self, connection: Connection | None, seconds: float) -> None:
        """Until it rings, or ``connection`` has something, or takes what was kept for it."""
        poll = select.poll()
        poll.register(self._ear, select.POLLIN)
        if connection:
            poll.register(connection.socket, select.POLLIN | (select.POLLOUT if connection.waits else 0))
        if any(ready == self._ear.fileno() for ready, _ in poll.poll(1000 * seconds)):
            with contextlib.suppress(OSError):
                self._ear.recv(_RECEIVE_BYTES)

    def close(self) -> None:
        self._hammer.close()
        self._ear.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
