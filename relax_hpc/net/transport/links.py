"""Authenticated connections between processes of a run, with a deadline for every wait."""

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
"""Connections of one listener, at most. Each has a thread. Further peers are refused, and read on
another plane."""
CONNECT_S = 10.0
"""Seconds to connect to a peer and to authenticate. Another program, which answers nothing, may
have got the port of a dead peer."""
SILENCE_S = 30.0
"""Default seconds without data after which a read fails; a run uses `liveness.lease_s`. If a node
loses power or a process is stopped, its connections stay open."""
_PIECE_BYTES = 1 << 20
ACCEPT_SHARE = 0.1
"""Share of a role's time that accepting a flood of connections takes, at most. Ending them takes
about as much again."""
CLOSE_S = 5.0
"""Seconds to wait for threads when a listener closes."""


class Deadline:
    """Time at which one operation, with all its waits, must have ended."""

    __slots__ = ("_end", "seconds", "silence")

    def __init__(self, seconds: float, silence: float = math.inf) -> None:
        """``silence``: seconds of a single wait for the other end, at most."""
        self.seconds, self.silence, self._end = seconds, silence, time.monotonic() + seconds

    def next_wait(self) -> float:
        """Seconds to wait for the next bytes of the other end. TimeoutError: the time is over."""
        return min(self.remaining(), self.silence)

    def remaining(self) -> float:
        """Seconds until the deadline. TimeoutError: it has passed."""
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"not done in {self.seconds:g} s")
        return remaining

    def ends_within(self, seconds: float) -> bool:
        """Whether the deadline will have passed in ``seconds``."""
        return time.monotonic() + seconds >= self._end

    def shortened(self, seconds: float) -> Deadline:
        """Deadline in ``seconds``, or at the end of this one if that is earlier."""
        return Deadline(min(seconds, self.remaining()), self.silence)


def receive(connection: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Exactly ``size`` bytes. OSError: they have not arrived in time."""
    data = bytearray(size)
    receive_into(connection, memoryview(data), deadline)
    return bytes(data)


def receive_into(
    connection: socket.socket,
    buffer: memoryview,
    deadline: Deadline,
    process: Callable[[memoryview], object] = lambda piece: None,
) -> None:
    """Fill ``buffer``. OSError: that takes too long.

    ``process`` is called with each piece directly after its arrival, while it is in the CPU's
    cache.
    """
    while buffer:
        connection.settimeout(deadline.next_wait())
        count = connection.recv_into(buffer[:_PIECE_BYTES])
        if not count:
            raise ConnectionError("the peer closed the connection")
        process(buffer[:count])
        buffer = buffer[count:]


def wait_for_request(connection: socket.socket) -> bool:
    """Wait without a limit. True: the peer has sent a request. False: it has disconnected."""
    connection.settimeout(None)
    # MSG_PEEK leaves the byte in the socket, for the code that reads the request.
    return bool(connection.recv(1, socket.MSG_PEEK))


def prove_token(
    connection: socket.socket, token: bytes, purpose: bytes, deadline: Deadline
) -> None:
    """Prove to the listening end that this process holds ``token``, and check its proof.

    ``purpose``: name of the intended listener. ConnectionError: the other end is another listener,
    or has another token.
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
    """Serves each connection in a thread, so that a slow or hostile peer harms only its connection.

    ``serve`` is called with each connection whose peer has proven that it holds ``token``. When it
    returns or raises OSError, the connection is closed. Peers without proof share one thread, so
    that they cannot make the process start threads.
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
        """``purpose``: name that readers must intend, see `prove_token`. ``check`` raises OSError
        for connections that are refused without authentication."""
        self._listening, self._serve, self._name = listening, serve, name
        self._selector = selectors.DefaultSelector()
        self._lobby = Lobby(listening, token, purpose, self._selector, ACCEPT_SHARE, check)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept_peers, name=name, daemon=True)
        self._thread.start()

    def _accept_peers(self) -> None:
        lobby = self._lobby
        while not self._closing.is_set():
            ready = [key.data for key, _ in self._selector.select(lobby.wait_limit_s())]
            for number in ready:
                if number is None:
                    continue
                authenticated = lobby.read_guest(number)
                if authenticated:
                    self._start(authenticated[0])
            # After the loop, because a guest whose proof has arrived is not overdue.
            lobby.end_overdue()
            if None in ready and not self._closing.is_set():
                lobby.accept()
        lobby.close()
        self._selector.close()

    def _start(self, connection: socket.socket) -> None:
        self._open = {
            socket_: thread for socket_, thread in self._open.items() if thread.is_alive()
        }
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
            # "can't start new thread": the user has reached the limit of processes.
            connection.close()
            return
        self._open[connection] = thread

    def _run(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                self._serve(connection)
        finally:
            # Under the lock: while `close` uses its descriptor, the kernel must not give the number
            # to another file.
            with self._lock:
                connection.close()

    def close(self) -> None:
        """End all connections and all threads."""
        self._closing.set()
        self._shut_down(self._listening)
        self._thread.join(CLOSE_S)
        for connection in self._open:
            self._shut_down(connection)
        for thread in self._open.values():
            thread.join(CLOSE_S)

    def _shut_down(self, connection: socket.socket) -> None:
        # shutdown(2) wakes a thread that is blocked in recv or accept. close(2) would not.
        with self._lock, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
