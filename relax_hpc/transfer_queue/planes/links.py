"""Connections between processes of one run: both ends prove that they hold its token, and every wait has an end.

The token itself is never sent: each end answers the other's random challenge with an HMAC over both challenges.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

MAX_CONNECTIONS = 1024
"""Of one listener; whoever comes then is turned away, and reads by another plane."""
PROOF_S = 5.0
CONNECT_S = 10.0
"""For a peer to be reached and to prove what it is. A dead maker's port may have gone to somebody who says nothing."""
_HELLO = b"RLXLINK1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_PIECE_BYTES = 1 << 20
_PAUSE_S = 0.1
CLOSE_S = 5.0


class Deadline:
    """When one operation, with all its waits, must be over."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then; TimeoutError if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done in {self.seconds:g} s")
        return left

    def at_most(self, seconds: float) -> Deadline:
        """One that ends with this one, or earlier: in so many seconds."""
        return Deadline(min(seconds, self.left()))


def receive(connection: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Exactly ``size`` bytes; an OSError if they do not come in time."""
    data = bytearray(size)
    receive_into(connection, memoryview(data), deadline)
    return bytes(data)


def receive_into(
    connection: socket.socket,
    room: memoryview,
    deadline: Deadline,
    notice: Callable[[memoryview], object] = lambda piece: None,
) -> None:
    """Fill ``room``, handing each piece to ``notice`` while it is in the cache; an OSError if that takes too long."""
    while room:
        connection.settimeout(deadline.left())
        count = connection.recv_into(room[:_PIECE_BYTES])
        if not count:
            raise ConnectionError("the peer closed the connection")
        notice(room[:count])
        room = room[count:]


def wait_for_request(connection: socket.socket) -> bool:
    """However long that takes: whether the peer asks for something; False once it has hung up."""
    connection.settimeout(None)
    return bool(connection.recv(1, socket.MSG_PEEK))


def _proof(token: bytes, role: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, role + nonces + purpose, "sha256")


def prove(connection: socket.socket, token: bytes, purpose: bytes, deadline: Deadline) -> None:
    """As the end that connected: show that we hold ``token``, and have the other end show it.

    ``purpose`` names the listener that is meant. ConnectionError if the other end is another, or has another token.
    """
    hello = receive(connection, len(_HELLO) + _NONCE_BYTES, deadline)
    if not hello.startswith(_HELLO):
        raise ConnectionError("what listens there is no plane of a run")
    nonces = hello[len(_HELLO) :] + secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(deadline.left())
    connection.sendall(nonces[_NONCE_BYTES:] + _proof(token, b"reader", purpose, nonces))
    try:
        answer = receive(connection, _PROOF_BYTES, deadline)
    except ConnectionError as error:
        raise ConnectionError("the peer refused the proof of the run's token") from error
    if not hmac.compare_digest(answer, _proof(token, b"maker", purpose, nonces)):
        raise ConnectionError("the peer has not proved that it holds the run's token")


def demand_proof(connection: socket.socket, token: bytes, purpose: bytes) -> None:
    """The listening end's part of `prove`, within PROOF_S."""
    deadline, nonce = Deadline(PROOF_S), secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(deadline.left())
    connection.sendall(_HELLO + nonce)
    answer = receive(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    nonces, proof = nonce + answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"reader", purpose, nonces)):
        raise ConnectionError("the peer has not proved that it holds the run's token")
    connection.settimeout(deadline.left())
    connection.sendall(_proof(token, b"maker", purpose, nonces))


class Listener:
    """Serves each connection in a thread of its own: a slow, broken or hostile peer harms its own connection alone.

    ``serve`` returns, or raises an OSError, when the connection is to be closed.
    """

    def __init__(self, listening: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        self._listening, self._serve, self._name = listening, serve, name
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                self._start(self._listening.accept()[0])
            except (OSError, RuntimeError):
                # No file descriptor or thread is to be had, or this is the end.
                self._closing.wait(_PAUSE_S)

    def _start(self, connection: socket.socket) -> None:
        self._open = {one: thread for one, thread in self._open.items() if thread.is_alive()}
        if len(self._open) >= MAX_CONNECTIONS:
            connection.close()
            return
        thread = threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-reader", daemon=True)
        thread.start()
        self._open[connection] = thread

    def _run(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                self._serve(connection)
        finally:
            # Not while `close` has its number in hand, which the next file could get.
            with self._lock:
                connection.close()

    def close(self) -> None:
        """Turn everybody away and end the threads."""
        self._closing.set()
        self._hang_up(self._listening)
        self._thread.join(CLOSE_S)
        self._listening.close()
        for connection in self._open:
            self._hang_up(connection)
        for thread in self._open.values():
            thread.join(CLOSE_S)

    def _hang_up(self, connection: socket.socket) -> None:
        with self._lock, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
