"""The endpoint of a run as programs of this node reach it: that of the gateway, or of a forwarder
on this node."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.net.transport.exchange import Message
from relax_hpc.rollout.agents.gateway.link import Link, reach

_FORWARDER_S = 300.0
"""Seconds for a forwarder to begin, whose modules may come from a shared filesystem."""


class Endpoint:
    """Way to the newest gateway; for one event loop."""

    def __init__(
        self, run: RunDir, serve: Callable[[Message], Awaitable[Message]], limit_s: float
    ) -> None:
        """``serve`` answers what the gateway asks. ``limit_s``: seconds for a gateway to be
        there."""
        self._run, self._serve, self._limit_s = run, serve, limit_s
        self._link: Link | None = None
        self._turn = asyncio.Lock()
        self._forwarder: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._url = ""

    async def reached(self) -> tuple[Link, str]:
        """The connection to it, and its address for programs. DeadlineError: there is none."""
        async with self._turn:
            if not self._link or self._link.lost.is_set():
                self._link = link = await reach(self._run, self._serve, self._limit_s)
                await self._end_forwarder()
                self._url = (
                    link.place.url if link.place.is_here else await self._begin_forwarder(link)
                )
            return self._link, self._url

    async def close(self) -> None:
        """End the connection, and the forwarder."""
        if self._link:
            self._link.close()
        await self._end_forwarder()

    async def _begin_forwarder(self, link: Link) -> str:
        """Address of a new forwarder, with which ``link`` is lost too. RelaxError: it does not
        begin."""
        command = [
            sys.executable,
            "-m",
            "relax_hpc.rollout.agents.gateway.forward",
            "--run_dir",
            str(self._run.root),
        ]
        self._forwarder = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert self._forwarder.stdout
        async with asyncio.timeout(_FORWARDER_S):
            url = await self._forwarder.stdout.readline()
        if not url:
            raise RelaxError(
                "the forwarder of this node has ended; what it printed is in the log of this role"
            )
        self._watching = asyncio.create_task(_lose(link, self._forwarder))
        return url.decode().strip()

    async def _end_forwarder(self) -> None:
        if self._watching:
            self._watching.cancel()
        if self._forwarder and self._forwarder.returncode is None:
            self._forwarder.kill()
            await self._forwarder.wait()


async def _lose(link: Link, forwarder: asyncio.subprocess.Process) -> None:
    """Have ``link`` lost when the forwarder ends: programs that talk to it are begun again."""
    await forwarder.wait()
    link.close("the forwarder of this node has ended")
