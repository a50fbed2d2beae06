"""The processes of an SGLang server. They are watched one by one, and they end together."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import psutil

from relax_hpc.base.processes import all_processes

_CHILD_TITLE = "sglang::"
"""Prefix of the titles of the processes that SGLang 0.5.21 needs. Other children, such as
compilers, may end."""
_SHARED_MEMORY = ("/dev/shm/sglang_", "/dev/shm/sgl_", "/dev/shm/psm_", "/dev/shm/nccl-")
"""Shared memory of SGLang 0.5.21, Python and NCCL that remains when its owner is killed."""


class ProcessSession:
    """The session of the process `leader`. Create it in a running event loop."""

    def __init__(self, leader: asyncio.subprocess.Process) -> None:
        self.leader = leader
        self._pidfds: list[int] = []
        self._memory: set[Path] = set()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Sentence that says which process has ended, and how. All others have been killed then."""
        self._waiting = asyncio.create_task(self._wait_for_leader())

    async def _wait_for_leader(self) -> None:
        code = await self.leader.wait()
        self._end(f"the server ended with code {code}")

    def watch_children(self) -> None:
        """From now on, end all processes when one of SGLang's children ends."""
        # A server of SGLang 0.5.21 whose detokenizer has died still accepts requests, and never
        # answers them.
        for process in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                title = " ".join(process.cmdline())
                if title.startswith(_CHILD_TITLE) and process.pid != self.leader.pid:
                    self._watch(
                        os.pidfd_open(process.pid), f"{title.strip()} (process {process.pid}) ended"
                    )

    def _watch(self, pidfd: int, description: str) -> None:
        self._pidfds.append(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._end, description)

    def _end(self, description: str) -> None:
        if not self.ended.done():
            self.ended.set_result(description)
            self._unwatch()
            # Before the kill: the mappings of a dead process cannot be read.
            self.shared_memory()
            kill(self.members())

    def _unwatch(self) -> None:
        for pidfd in self._pidfds:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    async def end(self, request_end: Callable[[], None], grace_s: float) -> None:
        """End all processes: the leader by ``request_end``, those that remain after ``grace_s`` by
        a kill. TimeoutError: a killed process still exists after ``grace_s``."""
        members = self.members()
        self._unwatch()
        with contextlib.suppress(ProcessLookupError):
            if not self.ended.done():
                request_end()
        await asyncio.wait([self.ended], timeout=grace_s)
        kill(self.members())
        async with asyncio.timeout(grace_s):
            await self._waiting
        # Without the leader, which only the event loop may reap.
        children = [process for process in members if process.pid != self.leader.pid]
        await asyncio.to_thread(psutil.wait_procs, children, timeout=grace_s)

    def members(self) -> list[psutil.Process]:
        """Living processes of the session."""

        def is_member(process: psutil.Process) -> bool:
            # ProcessLookupError: it has ended. PermissionError: a security module such as SELinux
            # hides processes of other users.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                return os.getsid(process.pid) == self.leader.pid
            return False

        return [process for process in all_processes() if is_member(process)]

    def shared_memory(self) -> set[Path]:
        """Files of shared memory that the processes have mapped now or at an earlier call, and that
        would remain after a kill."""
        mapped: set[Path] = set()
        for process in self.members():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    columns = line.split(maxsplit=5)
                    if len(columns) == 6 and columns[5].startswith(_SHARED_MEMORY):
                        mapped.add(Path(columns[5]))
        # A new set each time, because other threads read the attribute.
        self._memory = self._memory | mapped
        return self._memory


def kill(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to those of ``processes`` that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
