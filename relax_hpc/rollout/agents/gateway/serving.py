"""A gateway in this process: both its sides, and where others find it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.network import LOOPBACK
from relax_hpc.net.transport.listener import create_listening_socket
from relax_hpc.rollout.agents.gateway.broker import Broker
from relax_hpc.rollout.agents.gateway.front import Front
from relax_hpc.rollout.agents.gateway.place import Place, publish_place, purpose_of


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that serves."""

    front: Front
    broker: Broker
    serving: asyncio.Task[None]
    """Task that ends when it cannot serve any more."""


@contextlib.asynccontextmanager
async def gateway(
    run: RunDir, incarnation: int = 1, address: str = LOOPBACK, host: str = ""
) -> AsyncIterator[Gateway]:
    """Have a gateway of ``run`` serve while the body goes on; rollout processes connect at
    ``address``. ``host``: node that it is said to be on; empty: this one."""
    broker = Broker(create_listening_socket(address), run.token(), purpose_of(incarnation))
    front = Front(broker.knows, broker.ask)
    await front.start()
    place = Place(incarnation, host or socket.gethostname(), front.url, broker.endpoint)
    await asyncio.to_thread(publish_place, run, place)
    serving = asyncio.create_task(broker.serve())
    try:
        yield Gateway(front, broker, serving)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await front.close()
