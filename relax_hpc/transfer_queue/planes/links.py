"""Connections between processes of one run: both ends prove that they hold its token, and every wait has an end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from relax_hpc.rendezvous.open_files import connection_limit
from relax_hpc.transfer_queue.proof import ANSWER_BYTES, GREETING_BYTES, PROOF_BYTES, PROOF_S, Challenge, Response

MAX_CONNECTIONS = 1024
"""Of one listener; whoever comes then is turned away, and reads by another plane."""
MAX_UNPROVEN = 64
"""Of those, each of which has a thread."""
CONNECT_S = 10.0
"""For a peer to be reached and to prove what it is. A dead maker's port may have gone to somebody who says nothing."""
_PIECE_BYTES = 1 << 20
_PAUSE_S = 0.1
_REST_S = 0.01
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

    def over(self, seconds: float) -> bool:
        """Whether it will be in so many seconds."""
        return time.monotonic() + seconds >= self._end

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


def prove(connection: socket.socket, token: bytes, purpose: bytes, deadline: Deadline) -> None:
    """As the end that connected: show that we hold ``token``, and have the other end show it.

    ``purpose`` names the listener that is meant. ConnectionError if the other end is another, or has another token.
    """
    response = Response(token, purpose)
    answer = response.answer(receive(connection, GREETING_BYTES, deadline))
    connection.settimeout(deadline.left())
    connection.sendall(answer)
    try:
        proof = receive(connection, PROOF_BYTES, deadline)
    except ConnectionError as error:
        raise ConnectionError("the peer refused the proof of the run's token") from error
    response.check(proof)


def demand_proof(connection: socket.socket, token: bytes, purpose: bytes) -> None:
    """The listening end's part of `prove`, within PROOF_S."""
    deadline, challenge = Deadline(PROOF_S), Challenge(token, purpose)
    connection.settimeout(deadline.left())
    connection.sendall(challenge.greeting)
    proof, _ = challenge.check(receive(connection, ANSWER_BYTES, deadline))
    connection.settimeout(deadline.left())
    connection.sendall(proof)


class Listener:
    """Serves each connection in a thread of its own: a slow, broken or hostile peer harms its own connection alone.

    ``serve`` gets those that have proven that they hold ``token``; it returns, or raises an OSError, when the
    connection is to be closed.
    """

    def __init__(
        self,
        listening: socket.socket,
        token: bytes,
        purpose: bytes,
        serve: Callable[[socket.socket], None],
        name: str,
        check: Callable[[socket.socket], None] = lambda _: None,
    ) -> None:
        """``purpose``: what readers must mean, see `prove`; ``check``: OSError for who need not even be asked."""
        self._listening, self._token, self._purpose, self._serve, self._name = listening, token, purpose, serve, name
        self._check = check
        self._limit = connection_limit()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._unproven: dict[socket.socket, None] = {}
        """Those that came first at first."""
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
        crowded = len(self._open) >= MAX_CONNECTIONS or connection.fileno() >= self._limit
        if crowded or len(self._unproven) >= MAX_UNPROVEN:
            self._end_oldest_unproven()
        if crowded:
            connection.close()
            return
        with self._lock:
            self._unproven[connection] = None
        thread = threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-reader", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._forget(connection)
            raise
        self._open[connection] = thread

    def _end_oldest_unproven(self) -> None:
        """It has had its time; and who floods this process with connections does not get all of its own."""
        with self._lock:
            oldest = next(iter(self._unproven), None)
            self._unproven.pop(oldest, None)
        if oldest is not None:
            self._hang_up(oldest)
        self._closing.wait(_REST_S)

    def _run(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                self._check(connection)
                demand_proof(connection, self._token, self._purpose)
                with self._lock:
                    self._unproven.pop(connection, None)
                self._serve(connection)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        # Not while `close` has its number in hand, which the next file could get.
        with self._lock:
            self._unproven.pop(connection, None)
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
