"""The process of an agent program: it reads its task from standard input, and finds the endpoint in its environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from relax_hpc.rendezvous.process import clean_environment

_KEPT_BYTES = 64 << 10
"""Bytes of what it prints last that are kept."""
_BLOCK = 1 << 14
_FREE_BYTES, _REST_S = 1 << 20, 0.02
"""Bytes that it may print at its own pace, and seconds of rest after each block beyond: it waits then, nobody else."""
_LAST_S = 1.0
"""Seconds for what it printed last to be read: who has left its process group may hold the other end for ever."""


class Program:
    """A program while it runs, with all that it starts; for one event loop."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], task: Mapping[str, Any], memory_bytes: int
    ) -> None:
        """``command``: words, not a shell's; ``variables``: of its environment beside this process's; ``task``: what it
        reads, as JSON in one line; ``memory_bytes``: of each of its processes."""
        self._command, self._variables, self._task = command, variables, task
        self._memory_bytes = memory_bytes
        self._said: deque[bytes] = deque(maxlen=_KEPT_BYTES // _BLOCK)

    async def run(self) -> int:
        """Run it; its exit code, or minus the number of the signal that ended it. When this is cancelled, it is killed.

        OSError: there is no such program.
        """
        loop, (printed, prints) = asyncio.get_running_loop(), os.pipe()
        stream = asyncio.StreamReader()
        # A pipe of our own: one of asyncio's would have it wait for all that have inherited it.
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(printed, "rb"))
        reading = asyncio.create_task(self._read(stream))
        try:
            return await self._through(prints)
        finally:
            await asyncio.wait([reading], timeout=_LAST_S)
            pipe.close()
            await reading

    async def _through(self, prints: int) -> int:
        """The same, what it prints going to the open file ``prints``."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=prints,
                stderr=prints,
                # Of its own, so that what it starts can be killed with it.
                start_new_session=True,
                env=clean_environment() | self._variables,
            )
        finally:
            os.close(prints)
        assert process.stdin
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (self._memory_bytes, self._memory_bytes))
        try:
            # It may have closed it.
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(self._task).encode() + b"\n")
                process.stdin.close()
            return await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        left = _FREE_BYTES
        while part := await stream.read(_BLOCK):
            self._said.append(part)
            left -= len(part)
            if left < 0:
                await asyncio.sleep(_REST_S)

    @property
    def output(self) -> str:
        """End of what it has printed."""
        return b"".join(self._said).decode(errors="replace")
