"""The processes of a server that we started: its parts are watched one by one, and they end
together."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import psutil

from relax_hpc.base.processes import all_processes

_PART = "sglang::"
"""Beginning of the titles of processes that SGLang cannot do without; compilers and the like come
and go."""
_LEFT_BEHIND = ("/dev/shm/sglang_", "/dev/shm/sgl_", "/dev/shm/psm_", "/dev/shm/nccl-")
"""Shared memory that nobody removes when its maker is killed."""


class Session:
    """A session that `leader` began; make it in a running event loop."""

    def __init__(self, leader: asyncio.subprocess.Process) -> None:
        self.leader = leader
        self._pidfds: list[int] = []
        self._memory: set[Path] = set()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Sentence that says what has ended, and how; by then all the rest has been killed."""
        self._waiting = asyncio.create_task(self._wait_for_leader())

    async def _wait_for_leader(self) -> None:
        code = await self.leader.wait()
        self._end(f"the server ended with code {code}")

    def watch_parts(self) -> None:
        """Make the end of any of its parts the end of all from now on: a server whose detokenizer
        has died takes requests, and never answers."""
        for process in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                title = " ".join(process.cmdline())
                if title.startswith(_PART) and process.pid != self.leader.pid:
                    self._watch(
                        os.pidfd_open(process.pid), f"{title.strip()} (process {process.pid}) ended"
                    )

    def _watch(self, pidfd: int, says: str) -> None:
        self._pidfds.append(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._end, says)

    def _end(self, says: str) -> None:
        if not self.ended.done():
            self.ended.set_result(says)
            self._unwatch()
            # Of the dead nobody can tell any more what they had.
            self.shared_memory()
            kill(self.members())

    def _unwatch(self) -> None:
        for pidfd in self._pidfds:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    async def end(self, ask: Callable[[], None], grace_s: float) -> None:
        """End all: the leader by ``ask``, what is left after ``grace_s`` by a kill. TimeoutError:
        even that lives."""
        members = self.members()
        self._unwatch()
        with contextlib.suppress(ProcessLookupError):
            if not self.ended.done():
                ask()
        await asyncio.wait([self.ended], timeout=grace_s)
        kill(self.members())
        async with asyncio.timeout(grace_s):
            await self._waiting
        # The event loop alone may reap the leader.
        others = [one for one in members if one.pid != self.leader.pid]
        await asyncio.to_thread(psutil.wait_procs, others, timeout=grace_s)

    def members(self) -> list[psutil.Process]:
        """Living processes of the session."""

        def belongs(process: psutil.Process) -> bool:
            # It has ended, or is of somebody of whom a security module (SELinux) says nothing.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                return os.getsid(process.pid) == self.leader.pid
            return False

        return [process for process in all_processes() if belongs(process)]

    def shared_memory(self) -> set[Path]:
        """Files in memory that its processes have, or had when they were looked at, and that would
        outlive them."""
        found: set[Path] = set()
        for process in self.members():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                mapped = (words[5] for line in lines if len(words := line.split(maxsplit=5)) == 6)
                found |= {Path(path) for path in mapped if path.startswith(_LEFT_BEHIND)}
        # Another set each time: threads look at it.
        self._memory = self._memory | found
        return self._memory


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
