"""The endpoint of a run as programs of this node reach it: that of the gateway, or of a forwarder on this node."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

from relax_hpc.errors import RelaxError
from relax_hpc.gateway.exchange import Message
from relax_hpc.gateway.link import Link, reach
from relax_hpc.rundir import RunDir

_FORWARDER_S = 300.0
"""Seconds for a forwarder to begin, whose modules may come from a shared filesystem."""


class Endpoint:
    """Way to the newest gateway; for one event loop."""

    def __init__(self, run: RunDir, serve: Callable[[Message], Awaitable[Message]], limit_s: float) -> None:
        """``serve`` answers what the gateway asks. ``limit_s``: seconds for a gateway to be there."""
        self._run, self._serve, self._limit_s = run, serve, limit_s
        self._link: Link | None = None
        self._turn = asyncio.Lock()
        self._forwarder: asyncio.subprocess.Process | None = None
        self._url = ""

    async def reached(self) -> tuple[Link, str]:
        """The connection to it, and its address for programs. DeadlineError: there is none."""
        async with self._turn:
            if not self._link or self._link.lost.is_set():
                self._link = await reach(self._run, self._serve, self._limit_s)
                await self._end_forwarder()
                self._url = self._link.place.url
            if not self._link.place.is_here and (not self._forwarder or self._forwarder.returncode is not None):
                self._url = await self._begin_forwarder()
            return self._link, self._url

    async def close(self) -> None:
        """End the connection, and the forwarder."""
        if self._link:
            self._link.close()
        await self._end_forwarder()

    async def _begin_forwarder(self) -> str:
        """Address of a new forwarder. RelaxError: it does not begin."""
        command = [sys.executable, "-m", "relax_hpc.gateway.forward", "--run_dir", str(self._run.root)]
        self._forwarder = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert self._forwarder.stdout
        async with asyncio.timeout(_FORWARDER_S):
            url = await self._forwarder.stdout.readline()
        if not url:
            raise RelaxError("the forwarder of this node has ended; what it printed is in the log of this role")
        return url.decode().strip()

    async def _end_forwarder(self) -> None:
        if self._forwarder and self._forwarder.returncode is None:
            self._forwarder.kill()
            await self._forwarder.wait()
