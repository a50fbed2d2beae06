"""Wait of a supervisor until a process ends, a signal arrives, or another thread wakes it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable

from relax_hpc.cluster.supervise.group import Member
from relax_hpc.net.rendezvous.process import stop_signals

_PIPE_BYTES = 4096


class Wakeups:
    """Wait for the end of members and for signals that ask to stop. As a context manager it calls
    ``on_signal`` for each signal.

    When a terminal is closed, its shell and the kernel both send SIGHUP to the run, and a login
    manager may add SIGTERM. That is one request to stop. So SIGHUP calls ``on_signal`` only if no
    signal came before it, and the first other signal after it does not call it again.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._hung_up = False
        self._other_signals = 0
        self._selector = selectors.DefaultSelector()
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._out, selectors.EVENT_READ, None)

    def __enter__(self) -> Wakeups:
        # Python runs a signal handler only between two of its instructions. The byte that the
        # interpreter writes to this pipe also ends a `select` that began just before the handler.
        signal.set_wakeup_fd(self._in)
        for number in stop_signals():
            signal.signal(number, self._take_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number in stop_signals():
            # The second SIGHUP of a closed terminal may come as late as now.
            if not (number == signal.SIGHUP and self._hung_up):
                signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        os.close(self._in)
        os.close(self._out)

    def _take_signal(self, number: int, _: object) -> None:
        requests_before = max(self._other_signals, int(self._hung_up))
        if number == signal.SIGHUP:
            self._hung_up = True
        else:
            self._other_signals += 1
        if max(self._other_signals, int(self._hung_up)) > requests_before:
            self._on_signal()

    def watch(self, member: Member) -> None:
        """Make `wait` return when the process of ``member`` ends."""
        self._selector.register(member.pidfd, selectors.EVENT_READ, member)

    def unwatch(self, member: Member) -> None:
        """Watch a member no longer. It may never have been watched."""
        if member.pidfd >= 0 and member.pidfd in self._selector.get_map():
            self._selector.unregister(member.pidfd)

    def wait(self, seconds: float) -> None:
        """Sleep until a process ends, a signal arrives, a thread calls `wake`, or ``seconds`` have
        passed."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                os.read(self._out, _PIPE_BYTES)

    def wake(self) -> None:
        """Make `wait` return. Any thread may call this."""
        # A full pipe wakes as well, and after the end the pipe is closed.
        with contextlib.suppress(OSError):
            os.write(self._in, b"\0")
