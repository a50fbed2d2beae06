"""A worker process as its parent sees it: start, requests, and end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.net.rendezvous.process import PARENT, clean_environment
from relax_hpc.net.workers import frames

ATTEMPTS = 3
"""Times that a request is sent, at most. A request need not be the cause if its worker dies or is
suspended."""
START_S = 300.0
"""Seconds for a worker to import its modules, also from a slow shared file system."""

Message = dict[str, Any]


class WorkerEnded(Exception):
    """Error of a request whose worker ended. Its text describes the end."""

    def __init__(self, text: str, ended_itself: bool, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        """Exit code, negative for a signal. None: the pool ended the worker because of another
        request, or because it did not answer."""
        self.ended_itself = ended_itself
        """Whether the worker ended or was suspended while it worked on the request, and the pool
        did not end it."""


class Worker:
    """Worker process, for one event loop. `start` creates one."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        capacity: int,
        read_answer: Callable[[Message], Any],
    ) -> None:
        self.capacity = capacity
        """Number of requests that it accepts at a time."""
        self.busy = 0
        """Number of its requests, which the pool counts."""
        self.has_ended = False
        """Whether it accepts no further request."""
        self._process, self._read_answer = process, read_answer
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, module: str, setup: Message, read_answer: Callable[[Message], Any]
    ) -> Worker:
        """Start ``python -m module`` and send ``setup``, its first message.

        ``read_answer`` converts a message to an answer, before the next message is read.
        ConfigError: the worker answers that it cannot do this work. WorkerEnded: it ended, or did
        not answer within START_S.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # In a new session, so that its child processes can be killed with it.
            start_new_session=True,
            env=worker_environment(),
        )
        assert process.stdin and process.stdout
        try:
            async with asyncio.timeout(START_S):
                process.stdin.write(frames.pack(setup))
                first = await _message(process.stdout)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            raise error_of_exit(await _end(process)) from error
        except BaseException:
            await _end(process)
            raise
        if "error" in first:
            await _end(process)
            raise ConfigError(first["error"])
        return cls(process, first["at_once"] or 1, read_answer)

    async def ask(self, number: int, request: Mapping[str, Any]) -> Any:
        """The answer to ``request``. WorkerEnded: the worker ended before it has answered.
        TypeError, ValueError: JSON cannot represent ``request``."""
        message = frames.pack({"id": number, **request})
        if self.has_ended:
            raise WorkerEnded("had ended", False)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin
            self._process.stdin.write(message)
            return await answer
        finally:
            self._pending.pop(number, None)

    @property
    def is_suspended(self) -> bool:
        """Whether a signal has stopped its process, so that it cannot answer in time."""
        return not self.has_ended and is_suspended(self._process.pid)

    def kill(self) -> None:
        """Kill it and its child processes. Its pending requests fail with WorkerEnded."""
        if self.has_ended:
            # The kernel may have given its pid to another process.
            return
        self.has_ended = True
        self._reading.cancel()
        _kill(self._process)
        self._fail_pending(WorkerEnded("was ended because of another request", False))

    async def end(self) -> None:
        """Kill it, and wait until it has ended."""
        self.kill()
        await self._process.wait()

    async def _read(self) -> None:
        assert self._process.stdout
        with contextlib.suppress(EOFError, OSError, ValueError, TypeError, LookupError):
            while True:
                message = await _message(self._process.stdout)
                answer = self._pending.get(message["id"])
                if answer and not answer.done():
                    answer.set_result(self._read_answer(message))
        self.has_ended = True
        self._fail_pending(error_of_exit(await _end(self._process)))

    def _fail_pending(self, ended: WorkerEnded) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(WorkerEnded(str(ended), ended.ended_itself, ended.code))


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # The state follows the name of the process, which is in parentheses and may contain some.
    return status.rpartition(")")[2].split()[0] in ("T", "t")


async def _message(reader: asyncio.StreamReader) -> Any:
    """Next message of a worker. EOFError: it has closed its pipe. ValueError: the message is
    invalid."""
    try:
        head = await reader.readexactly(frames.HEAD.size)
        body = await reader.readexactly(frames.read_size(head))
    except asyncio.IncompleteReadError:
        raise EOFError from None
    return json.loads(body)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process group of a worker, because its child processes may outlive it."""
    # The worker leads its session, so its pid is also the id of the process group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> int:
    """Kill the process unless it has ended. Returns its exit code."""
    _kill(process)
    return await process.wait()


def worker_environment() -> dict[str, str]:
    """Environment for the workers of this process."""
    return clean_environment() | {PARENT: str(os.getpid())}


def error_of_exit(code: int) -> WorkerEnded:
    """Error of the requests to a worker that ended with exit ``code`` (negative for a signal)."""
    if code >= 0:
        text = f"ended by exit code {code}"
    else:
        # The kernel's out-of-memory killer sends SIGKILL.
        cause = ", possibly because memory was short" if -code == signal.SIGKILL else ""
        text = f"was ended by {signal.Signals(-code).name}{cause}"
    return WorkerEnded(text, True, code)
