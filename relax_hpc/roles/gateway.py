"""The role gateway, in the hub's group: the endpoint of existing agent programs, see `relax_hpc.gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter

from relax_hpc.gateway.broker import Broker
from relax_hpc.gateway.front import Front
from relax_hpc.gateway.place import Place, publish_place, purpose_of
from relax_hpc.rendezvous.network import own_address
from relax_hpc.roles.context import Context
from relax_hpc.roles.event_loop import run_until_stopped
from relax_hpc.transport.listener import listen

_TELL_S = 5.0
"""Seconds between two reports of what was refused."""
_ASKED = ("rollout", "requests of agents")
"""Cause of its waits: the work is that of engines."""


def run(context: Context) -> None:
    """Serve until the run is finished."""

    async def serve() -> None:
        assert context.client is not None
        address = own_address(context.config, context.group)
        broker = Broker(listen(address), context.run.token(), purpose_of(context.incarnation))
        front = Front(broker.knows, broker.ask)
        await front.start()
        place = Place(context.incarnation, socket.gethostname(), front.url, broker.endpoint)
        await asyncio.to_thread(publish_place, context.run, place)
        context.says("")
        serving = [asyncio.create_task(broker.serve()), asyncio.create_task(_tell(context, front))]
        over = asyncio.ensure_future(asyncio.wrap_future(context.client.status.over()))
        try:
            with context.spans("wait", cause=_ASKED):
                done, _ = await asyncio.wait([over, *serving], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            await front.close()

    run_until_stopped(serve, context.stop)


async def _tell(context: Context, front: Front) -> None:
    """Have the queue count, once in a while, for what reasons requests were refused; the log says how many."""
    assert context.client is not None
    told: Counter[str] = Counter()
    while True:
        await asyncio.sleep(_TELL_S)
        for reason, count in (front.refused - told).items():
            print(f"{count} requests refused: {reason}", flush=True)
            note = context.client.status.note("gateway_refused", "gateway", reason)
            with contextlib.suppress(Exception):
                await asyncio.wrap_future(note)
        told = Counter(front.refused)
