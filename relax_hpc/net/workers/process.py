"""A worker as its parent sees it: its process, and what is asked of it."""

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
"""Times that a request is sent: a worker that dies, or that somebody suspends, may not be at
fault."""
START_S = 300.0
"""Seconds for a worker to import what its work needs, from a shared filesystem too."""

Message = dict[str, Any]


class WorkerEnded(Exception):
    """Error of a request to a worker that ended; it says how the worker ended."""

    def __init__(self, how: str, by_itself: bool, code: int | None = None) -> None:
        super().__init__(how)
        self.code = code
        """Exit code, negative for a signal. None: it was ended because of another request, or did
        not answer."""
        self.ended_itself = by_itself
        """Whether it ended by itself while it was at what was asked of it, and nobody had ended
        it."""


class Worker:
    """Worker process, made by `start`; for one event loop."""

    def __init__(
        self, process: asyncio.subprocess.Process, places: int, read: Callable[[Message], Any]
    ) -> None:
        self.capacity = places
        """Requests that it may have at a time."""
        self.busy = 0
        """Places that are taken."""
        self.has_ended = False
        """Whether nothing can be asked of it any more."""
        self._process, self._as_answer = process, read
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, module: str, about: Message, read: Callable[[Message], Any]) -> Worker:
        """Start ``python -m module``, whose first message is ``about``; ``read`` makes an answer of
        a message, before the worker gets another.

        ConfigError: it says that it cannot do this. WorkerEnded: it did not come to that.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Of its own, so that what it starts can be killed with it.
            start_new_session=True,
            env=worker_environment(),
        )
        assert process.stdin and process.stdout
        try:
            async with asyncio.timeout(START_S):
                process.stdin.write(frames.pack(about))
                first = await _message(process.stdout)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            raise error_of_exit(await _end(process)) from error
        except BaseException:
            await _end(process)
            raise
        if "error" in first:
            await _end(process)
            raise ConfigError(first["error"])
        return cls(process, first["at_once"] or 1, read)

    async def ask(self, number: int, request: Mapping[str, Any]) -> Any:
        """The answer to ``request``. WorkerEnded: see there. TypeError, ValueError: JSON has no
        such request."""
        message = frames.pack({"id": number, **request})
        if self.has_ended:
            raise WorkerEnded("had ended", False)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin
            self._process.stdin.write(message)
            return await answer
        finally:
            self._asked.pop(number, None)

    @property
    def is_suspended(self) -> bool:
        """Whether its process was stopped by a signal, so that it cannot answer in time."""
        return not self.has_ended and is_suspended(self._process.pid)

    def kill(self) -> None:
        """End it, with all that it has started; what was asked of it was not at fault."""
        if self.has_ended:
            # Its number may be another process's by now.
            return
        self.has_ended = True
        self._reading.cancel()
        _kill(self._process)
        self._give_up(WorkerEnded("was ended because of another request", False))

    async def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        await self._process.wait()

    async def _read(self) -> None:
        assert self._process.stdout
        with contextlib.suppress(EOFError, OSError, ValueError, TypeError, LookupError):
            while True:
                message = await _message(self._process.stdout)
                if (answer := self._asked.get(message["id"])) and not answer.done():
                    answer.set_result(self._as_answer(message))
        self.has_ended = True
        self._give_up(error_of_exit(await _end(self._process)))

    def _give_up(self, ended: WorkerEnded) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(WorkerEnded(str(ended), ended.ended_itself, ended.code))


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        # The name, in parentheses, may contain some itself.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


async def _message(reader: asyncio.StreamReader) -> Any:
    """Next message of a worker. EOFError: there is none any more. ValueError: it is none of
    ours."""
    try:
        return json.loads(
            await reader.readexactly(frames.read_size(await reader.readexactly(frames.HEAD.size)))
        )
    except asyncio.IncompleteReadError:
        raise EOFError from None


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill it, and its whole process group: what it has started may have outlived it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> int:
    """Kill the process, if it has not ended by itself. Returns its exit code."""
    _kill(process)
    return await process.wait()


def worker_environment() -> dict[str, str]:
    """Environment of the workers of this process."""
    return clean_environment() | {PARENT: str(os.getpid())}


def error_of_exit(code: int) -> WorkerEnded:
    """Error of the requests to a worker that ended by itself with an exit ``code``."""
    if code >= 0:
        how = f"ended by exit code {code}"
    else:
        why = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
        how = f"was ended by {signal.Signals(-code).name}{why}"
    return WorkerEnded(how, True, code)
