"""Connections between processes of one run: both ends prove that they hold its token, and every
wait has an end."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable

from relax_hpc.net.transport.lobby import Lobby
from relax_hpc.net.transport.proof import GREETING_BYTES, PROOF_BYTES, ChallengeResponse

MAX_CONNECTIONS = 1024
"""Connections of one listener at most, each with a thread; further peers are turned away, and read
by another plane."""
CONNECT_S = 10.0
"""Seconds for a peer to be reached and to prove what it is. A dead maker's port may have gone to a
silent stranger."""
SILENCE_S = 30.0
"""Seconds without any sign of a maker of records, unless a run says when it takes a group for dead
(`liveness.lease_s`). One whose node lost power closes no connection, nor does one that is stopped;
whoever reads then asks again what there is to be read."""
_PIECE_BYTES = 1 << 20
ACCEPT_SHARE = 0.1
"""Share of a role's time that a flood of connections can take, and as much again for their ends."""
CLOSE_S = 5.0


class Deadline:
    """Time at which one operation, with all its waits, must be over."""

    __slots__ = ("_end", "seconds", "silence")

    def __init__(self, seconds: float, silence: float = math.inf) -> None:
        """``silence``: seconds of a single wait for the other end, at most."""
        self.seconds, self.silence, self._end = seconds, silence, time.monotonic() + seconds

    def next_wait(self) -> float:
        """Seconds that the other end may take for its next sign; TimeoutError if there are none."""
        return min(self.remaining(), self.silence)

    def remaining(self) -> float:
        """Seconds until the deadline; TimeoutError if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done in {self.seconds:g} s")
        return left

    def ends_within(self, seconds: float) -> bool:
        """Whether the deadline will have passed in ``seconds``."""
        return time.monotonic() + seconds >= self._end

    def shortened(self, seconds: float) -> Deadline:
        """Deadline that ends with this one, or in ``seconds`` if that is earlier."""
        return Deadline(min(seconds, self.remaining()), self.silence)


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
    """Fill ``room``, handing each piece to ``notice`` while it is in the cache; an OSError if that
    takes too long."""
    while room:
        connection.settimeout(deadline.next_wait())
        count = connection.recv_into(room[:_PIECE_BYTES])
        if not count:
            raise ConnectionError("the peer closed the connection")
        notice(room[:count])
        room = room[count:]


def wait_for_request(connection: socket.socket) -> bool:
    """However long that takes: whether the peer asks for something; False once it has hung up."""
    connection.settimeout(None)
    return bool(connection.recv(1, socket.MSG_PEEK))


def prove_token(
    connection: socket.socket, token: bytes, purpose: bytes, deadline: Deadline
) -> None:
    """Show the listening end that we hold ``token``, and have it show the same.

    ``purpose`` names the listener that is meant. ConnectionError if the other end is another, or
    has another token.
    """
    response = ChallengeResponse(token, purpose)
    answer = response.answer(receive(connection, GREETING_BYTES, deadline))
    connection.settimeout(deadline.remaining())
    connection.sendall(answer)
    try:
        proof = receive(connection, PROOF_BYTES, deadline)
    except ConnectionError as error:
        raise ConnectionError("the peer refused the proof of the run's token") from error
    response.check(proof)


class ThreadListener:
    """Serves each connection in a thread of its own: a slow, broken or hostile peer harms its own
    connection alone.

    ``serve`` gets those that have proven that they hold ``token``; it returns, or raises an
    OSError, when the connection is to be closed. Until then they share one thread: strangers make
    no others, however many come and go.
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
        """``purpose``: what readers must mean, see `prove_token`; ``check``: OSError for who need
        not even be asked."""
        self._listening, self._serve, self._name = listening, serve, name
        self._selector = selectors.DefaultSelector()
        self._lobby = Lobby(listening, token, purpose, self._selector, ACCEPT_SHARE, check)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._let_in, name=name, daemon=True)
        self._thread.start()

    def _let_in(self) -> None:
        lobby = self._lobby
        while not self._closing.is_set():
            ready = [key.data for key, _ in self._selector.select(lobby.wait_limit_s())]
            for number in ready:
                if number is not None and (known := lobby.read_guest(number)):
                    self._start(known[0])
            # Who has just proven itself has done so before others come.
            lobby.end_overdue()
            if None in ready and not self._closing.is_set():
                lobby.accept()
        lobby.close()
        self._selector.close()

    def _start(self, connection: socket.socket) -> None:
        self._open = {one: thread for one, thread in self._open.items() if thread.is_alive()}
        if len(self._open) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.settimeout(None)
        thread = threading.Thread(
            target=self._run, args=(connection,), name=f"{self._name}-reader", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # No thread is to be had.
            connection.close()
            return
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
        for connection in self._open:
            self._hang_up(connection)
        for thread in self._open.values():
            thread.join(CLOSE_S)

    def _hang_up(self, connection: socket.socket) -> None:
        with self._lock, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
