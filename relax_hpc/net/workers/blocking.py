"""A worker for one request at a time, for callers that are not coroutines.

A request to a `Worker` of an event loop in another thread takes six times as long (303 instead of
51 microseconds for a chat of 400 characters).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.net.workers import frames
from relax_hpc.net.workers.process import (
    START_S,
    Message,
    WorkerEnded,
    error_of_exit,
    worker_environment,
)

_BLOCK_BYTES = 1 << 18


class BlockingWorker:
    """Worker process with the protocol of `Worker`. One thread at a time may use it.

    Any thread may start it, so its module calls `serve` with ``dies_with_thread=False``.
    """

    def __init__(self, module: str, setup: Message) -> None:
        """Start ``python -m module`` and send ``setup``, its first message.

        ConfigError: the worker answers that it cannot do this work. WorkerEnded: it ended, or did
        not answer within START_S.
        """
        self._process = subprocess.Popen(
            (sys.executable, "-m", module),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # In a new session, so that its child processes can be killed with it.
            start_new_session=True,
            env=worker_environment(),
        )
        assert self._process.stdin and self._process.stdout
        self._requests_fd = self._process.stdin.fileno()
        self._answers_fd = self._process.stdout.fileno()
        # Reads and writes of a blocking pipe have no timeout.
        os.set_blocking(self._requests_fd, False)
        os.set_blocking(self._answers_fd, False)
        self.has_ended = False
        """Whether the process has ended and accepts no request."""
        first = self._exchange(setup, START_S)
        if "error" in first:
            self.end()
            raise ConfigError(first["error"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any], limit_s: float) -> Message:
        """The answer to ``request``.

        WorkerEnded: the worker ended, or was ended because it did not answer within ``limit_s``.
        TypeError, ValueError, RecursionError: JSON cannot represent ``request``.
        """
        return self._exchange({"id": 0, **request}, limit_s)

    def end(self) -> int:
        """Kill the worker and all processes that it started. Returns its exit code."""
        if not self.has_ended:
            self.has_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        return self._process.returncode

    def _exchange(self, message: Mapping[str, Any], limit_s: float) -> Message:
        data, deadline = frames.pack(message), time.monotonic() + limit_s
        if self.has_ended:
            raise WorkerEnded("had ended", False)
        try:
            self._send(data, deadline)
            return self._receive(deadline)
        except TimeoutError:
            self.end()
            raise WorkerEnded(f"did not answer within {limit_s:g} s", False) from None
        except (OSError, EOFError, ValueError):
            raise error_of_exit(self.end()) from None
        except BaseException:
            # After an exception such as KeyboardInterrupt, the answer to this request is still to
            # come. The next request would receive it.
            self.end()
            raise

    def _send(self, data: bytes, deadline: float) -> None:
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[os.write(self._requests_fd, unsent) :]
            except BlockingIOError:
                _await(self._requests_fd, select.POLLOUT, deadline)

    def _receive(self, deadline: float) -> Message:
        data, size = bytearray(), frames.HEAD.size
        while len(data) < size:
            _await(self._answers_fd, select.POLLIN, deadline)
            block = os.read(self._answers_fd, _BLOCK_BYTES)
            if not block:
                raise EOFError
            data += block
            if size == frames.HEAD.size <= len(data):
                size += frames.read_size(bytes(data[:size]))
        return json.loads(data[frames.HEAD.size :])


def _await(fd: int, event: int, deadline: float) -> None:
    """Wait for ``event`` or an error of a pipe. TimeoutError: none before ``deadline``."""
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError
