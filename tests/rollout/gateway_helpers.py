"""The gateway of a run, in the process of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.rundir import RunDir
from relax_hpc.net.transport.exchange import Message
from relax_hpc.rollout.agents.gateway import serving
from relax_hpc.rollout.agents.gateway.broker import Broker
from relax_hpc.rollout.agents.gateway.front import Front, key_of
from relax_hpc.rollout.agents.gateway.link import Link, reach

LIMIT_S = 120.0


@dataclass
class Gateway:
    """The hub's part, in this process."""

    run: RunDir
    front: Front
    broker: Broker

    @property
    def url(self) -> str:
        return self.front.url

    async def opened(
        self, name: str, serve: Callable[[Message], Awaitable[Message]]
    ) -> tuple[Link, str]:
        """A session of a rollout process of its own, which answers by ``serve``, and its bearer."""
        link, bearer = await reach(self.run, serve, LIMIT_S), f"sk-{name}"
        await link.call(do="open", session=name, key=key_of(bearer))
        return link, bearer


@asynccontextmanager
async def gateway(folder: Path, host: str = "") -> AsyncIterator[Gateway]:
    """``host``: the node that it says it is on; empty: this one."""
    run = RunDir(folder / "run")
    run.create()
    run.rendezvous("hub").mkdir(parents=True)
    async with serving.gateway(run, host=host) as there, asyncio.timeout(LIMIT_S):
        yield Gateway(run, there.front, there.broker)
