"""Frames over TCP: a length and as many bytes, which the other end has sealed for this place of
this connection.

Plain sockets, without the threads that a messaging library has at each end: `tools/bench/queue`,
rows `latency` and `control`, shows what a request costs. `listener` has the end of those who
listen.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from urllib.parse import urlsplit

from relax_hpc.net.transport.proof import GREETING_BYTES, PROOF_BYTES, PROOF_S, ChallengeResponse
from relax_hpc.net.transport.wire import MAC_BYTES, MAX_MESSAGE_BYTES, BadMessage, Bytes, Seal

_SIZE = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18
_MAX_BACKLOG_BYTES = 8 * MAX_MESSAGE_BYTES
"""Bytes kept for a peer that does not read, at most: it is not spoken to any more."""
_SILENT_S = 60
"""Seconds of silence after which the system asks whether the other end is still there."""


def frame_content(content: Bytes) -> bytes:
    """Bytes of ``content`` as a frame on its way."""
    return _SIZE.pack(len(content)) + content


class FrameCutter:
    """Cuts what comes into frames.

    >>> cutter = FrameCutter()
    >>> second = frame_content(b"the second frame, of which five bytes have come")
    >>> cutter.add(frame_content(b"the first frame of two") + second[:5])
    >>> cutter.next(), cutter.next()
    (bytearray(b'the first frame of two'), None)
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def add(self, data: bytes) -> None:
        self._rest += data

    @property
    def complete(self) -> bool:
        """Whether there is a next frame. BadMessage: it has a length that no frame has, and nothing
        can follow."""
        rest = self._rest
        if len(rest) < _SIZE.size:
            return False
        (size,) = _SIZE.unpack_from(rest)
        if not MAC_BYTES < size <= MAX_MESSAGE_BYTES:
            raise BadMessage(
                f"frame of {size} bytes, allowed {MAC_BYTES + 1} to {MAX_MESSAGE_BYTES}"
            )
        return len(rest) >= _SIZE.size + size

    def next(self) -> bytearray | None:
        """The next frame, if it has come whole. BadMessage: see `complete`."""
        if not self.complete:
            return None
        rest = self._rest
        end = _SIZE.size + _SIZE.unpack_from(rest)[0]
        frame = rest[_SIZE.size : end]
        del rest[:end]
        return frame


class FrameConnection:
    """A stream socket whose ends know each other, and that nobody waits for: what cannot be sent at
    once is kept."""

    __slots__ = ("_backlog", "_cutter", "_opens", "_seals", "socket")

    def __init__(self, made: socket.socket, key: bytes, listens: bool) -> None:
        """``key``: what both ends came to, see `proof`; ``listens``: this is the end that was
        connected to."""
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
        self.socket, self._backlog, self._cutter = made, bytearray(), FrameCutter()
        self._seals, self._opens = (
            Seal(key, to_listener=not listens),
            Seal(key, to_listener=listens),
        )

    def send(self, payload: Bytes) -> None:
        """Send ``payload``. OSError: it is broken, or its other end does not read."""
        data = frame_content(self._seals.frame(payload))
        if self._backlog:
            self._backlog += data
            self.flush()
        elif (sent := self._sent(data)) < len(data):
            self._backlog += memoryview(data)[sent:]
        if len(self._backlog) > _MAX_BACKLOG_BYTES:
            raise BlockingIOError(f"{len(self._backlog)} bytes were sent and not read")

    def flush(self) -> None:
        """Send what can be sent now of what was kept. OSError: it is broken."""
        while self._backlog and (sent := self._sent(self._backlog)):
            del self._backlog[:sent]

    @property
    def has_backlog(self) -> bool:
        """Whether something is kept that could not be sent yet."""
        return bool(self._backlog)

    def receive(self) -> None:
        """Take what is there now, for `payloads`. OSError: it is broken, or has ended."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            data = self.socket.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the other end has closed the connection")
            self._cutter.add(data)

    def payloads(self, most: int | None = None) -> list[memoryview]:
        """Payloads of the frames that have come, in order; at most ``most`` of them. BadMessage:
        nothing can follow.

        The frames before a bad one are lost with it.
        """
        found: list[memoryview] = []
        while (most is None or len(found) < most) and (frame := self._cutter.next()) is not None:
            found.append(self._opens.payload(frame))
        return found

    @property
    def has_more(self) -> bool:
        """Whether `payloads` has something to give. BadMessage as there."""
        return self._cutter.complete

    def _sent(self, data: Bytes) -> int:
        try:
            return self.socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def close(self) -> None:
        self.socket.close()

    def wait(self, seconds: float) -> None:
        """Wait until something has come, or what was kept can be sent, or ``seconds`` have
        passed."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN | (select.POLLOUT if self.has_backlog else 0))
        poll.poll(1000 * seconds)


class PendingConnection:
    """A connection in the making, from the connecting end: nothing is said to who has not proven
    what it is.

    Whoever has the port of a controller that has died may listen there, and say nothing.
    """

    def __init__(self, endpoint: str, token: bytes, purpose: bytes, seconds: float) -> None:
        """Connect to ``endpoint`` (tcp://host:port). OSError: nobody listens there, or accepts
        within ``seconds``."""
        self._socket = open_socket(endpoint, seconds)
        self._response, self._greeted, self._heard = (
            ChallengeResponse(token, purpose),
            False,
            bytearray(),
        )
        self._end = time.monotonic() + PROOF_S

    def proceed(self, seconds: float) -> FrameConnection | None:
        """The connection, once both ends have proven themselves; None if that takes longer than
        ``seconds`` more.

        OSError: it will never be one. It is closed then.
        """
        until = min(time.monotonic() + seconds, self._end)
        try:
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                try:
                    if key := self._hear():
                        return FrameConnection(self._socket, key, listens=False)
                except TimeoutError:
                    break
            if time.monotonic() >= self._end:
                raise TimeoutError(
                    f"who listens has not proved in {PROOF_S:g} s that it holds the run's token"
                )
        except OSError:
            self.close()
            raise
        return None

    def _hear(self) -> bytes | None:
        """Key of the connection, if the next bytes bring the proof."""
        wanted = PROOF_BYTES if self._greeted else GREETING_BYTES
        data = self._socket.recv(wanted - len(self._heard))
        if not data:
            raise ConnectionResetError("who listens has closed the connection")
        self._heard += data
        if len(self._heard) < wanted:
            return None
        heard, self._heard = bytes(self._heard), bytearray()
        if self._greeted:
            return self._response.check(heard)
        self._socket.sendall(self._response.answer(heard))
        self._greeted = True
        return None

    def close(self) -> None:
        self._socket.close()


def connect(endpoint: str, token: bytes, purpose: bytes, seconds: float) -> FrameConnection:
    """A connection to ``endpoint``, whose ends know each other. OSError: there is none within
    ``seconds``."""
    knock = PendingConnection(endpoint, token, purpose, seconds)
    if made := knock.proceed(seconds):
        return made
    knock.close()
    raise TimeoutError(f"{endpoint}: no proof of the run's token in {seconds:g} s")


def endpoint_of(host: str, port: int) -> str:
    """
    >>> endpoint_of("127.0.0.1", 80), endpoint_of("::1", 80)
    ('tcp://127.0.0.1:80', 'tcp://[::1]:80')
    """
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def wake_listener(endpoint: str, seconds: float) -> None:
    """Wake whoever listens there, if anybody does."""
    with contextlib.suppress(OSError):
        open_socket(endpoint, seconds).close()


def open_socket(endpoint: str, seconds: float) -> socket.socket:
    """A connection to ``endpoint``. OSError: no process listens there, or it is no endpoint."""
    try:
        place = urlsplit(endpoint)
        return socket.create_connection((place.hostname or "", place.port or 0), seconds)
    except ValueError as error:
        raise ConnectionError(f"{endpoint}: no endpoint: {error}") from error


class Wakeup:
    """Bell that wakes a thread that waits for a connection."""

    def __init__(self) -> None:
        self._hammer, self._ear = socket.socketpair()
        for end in (self._hammer, self._ear):
            end.setblocking(False)

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            self._hammer.send(b"!")

    def wait(self, connection: FrameConnection | None, seconds: float) -> None:
        """Wait until it rings, ``connection`` has something or takes what was kept, or ``seconds``
        have passed."""
        poll = select.poll()
        poll.register(self._ear, select.POLLIN)
        if connection:
            poll.register(
                connection.socket, select.POLLIN | (select.POLLOUT if connection.has_backlog else 0)
            )
        if any(ready == self._ear.fileno() for ready, _ in poll.poll(1000 * seconds)):
            with contextlib.suppress(OSError):
                self._ear.recv(_RECEIVE_BYTES)

    def close(self) -> None:
        self._hammer.close()
        self._ear.close()
