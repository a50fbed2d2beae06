"""The endpoint of a run for programs of this node: the gateway's, or that of a forwarder on this
node."""

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
"""Seconds for a forwarder to start, whose modules may be on a slow shared filesystem."""


class Endpoint:
    """Connection to the newest gateway, with a forwarder if needed; for one event loop."""

    def __init__(
        self, run: RunDir, serve: Callable[[Message], Awaitable[Message]], limit_s: float
    ) -> None:
        """``serve`` answers the gateway's calls. ``limit_s``: seconds to wait for a gateway."""
        self._run, self._serve, self._limit_s = run, serve, limit_s
        self._link: Link | None = None
        self._connecting = asyncio.Lock()
        self._forwarder: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._url = ""

    async def connect(self) -> tuple[Link, str]:
        """The connection to the gateway, opened again if it was lost, and the address for programs.
        DeadlineError: there is no gateway."""
        async with self._connecting:
            if not self._link or self._link.lost.is_set():
                self._link = link = await reach(self._run, self._serve, self._limit_s)
                await self._end_forwarder()
                if link.address.is_local:
                    self._url = link.address.url
                else:
                    self._url = await self._start_forwarder(link)
            return self._link, self._url

    async def close(self) -> None:
        """Close the connection, and end the forwarder."""
        if self._link:
            self._link.close()
        await self._end_forwarder()

    async def _start_forwarder(self, link: Link) -> str:
        """Address of a new forwarder. If it ends, ``link`` is closed. RelaxError: it does not
        start."""
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
                "the forwarder of this node has ended; its output is in the log of this role"
            )
        self._watching = asyncio.create_task(_close_with(link, self._forwarder))
        return url.decode().strip()

    async def _end_forwarder(self) -> None:
        if self._watching:
            self._watching.cancel()
        if self._forwarder and self._forwarder.returncode is None:
            self._forwarder.kill()
            await self._forwarder.wait()


async def _close_with(link: Link, forwarder: asyncio.subprocess.Process) -> None:
    """Close ``link`` when the forwarder ends, so that its programs are started again."""
    await forwarder.wait()
    link.close("the forwarder of this node has ended")
