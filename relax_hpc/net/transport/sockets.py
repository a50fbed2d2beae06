"""Frames over TCP: a length, and as many bytes, authenticated by `wire.Seal`.

These are plain sockets, without the threads that a messaging library has at each end.
`tools/bench/queue`, rows `latency` and `control`, measures the cost of a request. `listener` has
the listening end.
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
"""Pending bytes for a peer that does not read, at most. With more, the connection fails."""
_SILENT_S = 60
"""Seconds without data after which the kernel sends keepalive probes."""


def frame_content(content: Bytes) -> bytes:
    """Bytes of a frame with ``content``."""
    return _SIZE.pack(len(content)) + content


class FrameCutter:
    """Divides received bytes into frames.

    >>> cutter = FrameCutter()
    >>> second = frame_content(b"the second frame, of which five bytes have come")
    >>> cutter.add(frame_content(b"the first frame of two") + second[:5])
    >>> cutter.next(), cutter.next()
    (bytearray(b'the first frame of two'), None)
    """

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        self._buffer += data

    @property
    def complete(self) -> bool:
        """Whether the next frame is complete. BadMessage: its length is invalid, so that no later
        frame can be read."""
        buffer = self._buffer
        if len(buffer) < _SIZE.size:
            return False
        (size,) = _SIZE.unpack_from(buffer)
        if not MAC_BYTES < size <= MAX_MESSAGE_BYTES:
            raise BadMessage(
                f"frame of {size} bytes, allowed {MAC_BYTES + 1} to {MAX_MESSAGE_BYTES}"
            )
        return len(buffer) >= _SIZE.size + size

    def next(self) -> bytearray | None:
        """The next frame. None: it is not complete. BadMessage: see `complete`."""
        if not self.complete:
            return None
        buffer = self._buffer
        end = _SIZE.size + _SIZE.unpack_from(buffer)[0]
        frame = buffer[_SIZE.size : end]
        del buffer[:end]
        return frame


class FrameConnection:
    """An authenticated stream socket that never blocks. Bytes that cannot be sent yet are kept."""

    __slots__ = ("_backlog", "_cutter", "_receiving", "_sending", "socket")

    def __init__(self, connection: socket.socket, key: bytes, listens: bool) -> None:
        """``key``: key of the connection, see `proof`. ``listens``: this is the listening end."""
        connection.setblocking(False)
        # Without TCP_NODELAY, Linux delays a small frame until the previous one is acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A node that loses its power closes no connection. Keepalive probes detect that.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
        self.socket, self._backlog, self._cutter = connection, bytearray(), FrameCutter()
        self._sending = Seal(key, to_listener=not listens)
        self._receiving = Seal(key, to_listener=listens)

    def send(self, payload: Bytes) -> None:
        """Send ``payload``. OSError: the connection is broken, or the other end does not read."""
        data = frame_content(self._sending.frame(payload))
        if self._backlog:
            self._backlog += data
            self.flush()
        else:
            sent = self._try_send(data)
            if sent < len(data):
                self._backlog += memoryview(data)[sent:]
        if len(self._backlog) > _MAX_BACKLOG_BYTES:
            raise BlockingIOError(f"{len(self._backlog)} bytes were sent and not read")

    def flush(self) -> None:
        """Send pending bytes, as many as possible now. OSError: the connection is broken."""
        while self._backlog:
            sent = self._try_send(self._backlog)
            if not sent:
                return
            del self._backlog[:sent]

    @property
    def has_backlog(self) -> bool:
        """Whether bytes are pending."""
        return bool(self._backlog)

    def receive(self) -> None:
        """Receive the bytes that have arrived, for `payloads`. OSError: the connection has
        ended."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            data = self.socket.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the other end has closed the connection")
            self._cutter.add(data)

    def payloads(self, limit: int | None = None) -> list[memoryview]:
        """Payloads of complete frames, in order, at most ``limit``.

        BadMessage: a frame is invalid. The frames before it, which were not returned, are lost.
        """
        payloads: list[memoryview] = []
        while limit is None or len(payloads) < limit:
            frame = self._cutter.next()
            if frame is None:
                break
            payloads.append(self._receiving.payload(frame))
        return payloads

    @property
    def has_more(self) -> bool:
        """Whether `payloads` would return a payload. BadMessage: see there."""
        return self._cutter.complete

    def _try_send(self, data: Bytes) -> int:
        """Number of bytes that the kernel has taken."""
        try:
            return self.socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def close(self) -> None:
        self.socket.close()

    def wait(self, seconds: float) -> None:
        """Wait until bytes have arrived, or pending bytes can be sent, at most ``seconds``."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN | (select.POLLOUT if self.has_backlog else 0))
        poll.poll(1000 * seconds)


class PendingConnection:
    """A connection of the connecting end that has not authenticated. Until then it sends no
    request.

    Another program, which answers nothing, may have got the port of a dead controller. Therefore
    the authentication has a deadline.
    """

    def __init__(self, endpoint: str, token: bytes, purpose: bytes, seconds: float) -> None:
        """Connect to ``endpoint`` (tcp://host:port). OSError: no process accepts within
        ``seconds``."""
        self._socket = open_socket(endpoint, seconds)
        self._response = ChallengeResponse(token, purpose)
        self._is_greeted, self._received = False, bytearray()
        self._end = time.monotonic() + PROOF_S

    def proceed(self, seconds: float) -> FrameConnection | None:
        """The connection, once both ends have authenticated. None: that takes over ``seconds``.

        OSError: the authentication has failed, and the socket is closed.
        """
        deadline = min(time.monotonic() + seconds, self._end)
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                self._socket.settimeout(remaining)
                try:
                    key = self._receive_step()
                except TimeoutError:
                    break
                if key:
                    return FrameConnection(self._socket, key, listens=False)
            if time.monotonic() >= self._end:
                raise TimeoutError(
                    f"the listener has not proved in {PROOF_S:g} s that it holds the run's token"
                )
        except OSError:
            self.close()
            raise
        return None

    def _receive_step(self) -> bytes | None:
        """Receive bytes of the greeting or of the proof. Returns the key after the whole proof."""
        expected = PROOF_BYTES if self._is_greeted else GREETING_BYTES
        data = self._socket.recv(expected - len(self._received))
        if not data:
            raise ConnectionResetError("the listener has closed the connection")
        self._received += data
        if len(self._received) < expected:
            return None
        message, self._received = bytes(self._received), bytearray()
        if self._is_greeted:
            return self._response.check(message)
        self._socket.sendall(self._response.answer(message))
        self._is_greeted = True
        return None

    def close(self) -> None:
        self._socket.close()


def connect(endpoint: str, token: bytes, purpose: bytes, seconds: float) -> FrameConnection:
    """An authenticated connection to ``endpoint``. OSError: it takes longer than
    ``seconds``."""
    pending = PendingConnection(endpoint, token, purpose, seconds)
    connection = pending.proceed(seconds)
    if connection:
        return connection
    pending.close()
    raise TimeoutError(f"{endpoint}: no proof of the run's token in {seconds:g} s")


def endpoint_of(host: str, port: int) -> str:
    """Endpoint of a listener at ``host`` and ``port``.

    >>> endpoint_of("127.0.0.1", 80), endpoint_of("::1", 80)
    ('tcp://127.0.0.1:80', 'tcp://[::1]:80')
    """
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def wake_listener(endpoint: str, seconds: float) -> None:
    """Wake the thread that listens at ``endpoint``, by a connection. Errors are ignored."""
    with contextlib.suppress(OSError):
        open_socket(endpoint, seconds).close()


def open_socket(endpoint: str, seconds: float) -> socket.socket:
    """A socket connected to ``endpoint``. OSError: no process listens there, or it is invalid."""
    try:
        # `port` raises ValueError if it is no number, or out of range.
        url = urlsplit(endpoint)
        return socket.create_connection((url.hostname or "", url.port or 0), seconds)
    except ValueError as error:
        raise ConnectionError(f"{endpoint}: no endpoint: {error}") from error


class Wakeup:
    """Wakes a thread that waits for a connection."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        for end in (self._sender, self._receiver):
            end.setblocking(False)

    def ring(self) -> None:
        """Wake the thread, or let its next `wait` return immediately."""
        # If the buffer is full, the thread wakes anyway.
        with contextlib.suppress(OSError):
            self._sender.send(b"!")

    def wait(self, connection: FrameConnection | None, seconds: float) -> None:
        """Wait for `ring`, at most ``seconds``.

        It also ends when ``connection`` has received bytes or can send pending bytes.
        """
        poll = select.poll()
        poll.register(self._receiver, select.POLLIN)
        if connection:
            output = select.POLLOUT if connection.has_backlog else 0
            poll.register(connection.socket, select.POLLIN | output)
        ready = [descriptor for descriptor, _ in poll.poll(1000 * seconds)]
        if self._receiver.fileno() in ready:
            with contextlib.suppress(OSError):
                self._receiver.recv(_RECEIVE_BYTES)

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()
