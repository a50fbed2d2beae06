"""A gateway in this process: its front, its broker and its published address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.network import LOOPBACK
from relax_hpc.net.transport.listener import create_listening_socket
from relax_hpc.rollout.agents.gateway.address import (
    GatewayAddress,
    publish_address,
    purpose_of,
)
from relax_hpc.rollout.agents.gateway.broker import Broker
from relax_hpc.rollout.agents.gateway.front import Front


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    front: Front
    broker: Broker
    serving: asyncio.Task[None]
    """Task that ends when the gateway can no longer serve."""


@contextlib.asynccontextmanager
async def gateway(
    run: RunDir, incarnation: int = 1, address: str = LOOPBACK, host: str = ""
) -> AsyncIterator[Gateway]:
    """Run a gateway of ``run`` while the body runs. Rollout processes connect at ``address``.
    ``host``: published name of its node; empty: this node."""
    broker = Broker(create_listening_socket(address), run.token(), purpose_of(incarnation))
    front = Front(broker.knows, broker.answer)
    await front.start()
    published = GatewayAddress(
        incarnation, host or socket.gethostname(), front.url, broker.endpoint
    )
    await asyncio.to_thread(publish_address, run, published)
    serving = asyncio.create_task(broker.serve())
    try:
        yield Gateway(front, broker, serving)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await front.close()
