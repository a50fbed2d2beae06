"""The role gateway, in the hub's group: the endpoint of existing agent programs, see
`relax_hpc.rollout.agents.gateway`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from relax_hpc.net.rendezvous.network import own_address
from relax_hpc.queue.process_context import Context
from relax_hpc.roles.event_loop import run_until_stopped
from relax_hpc.rollout.agents.gateway.front import Front
from relax_hpc.rollout.agents.gateway.serving import gateway

_TELL_S = 5.0
"""Seconds between two reports of what was refused."""
_ASKED = ("rollout", "requests of agents")
"""Cause of its waits: the work is that of engines."""


def run(context: Context) -> None:
    """Serve until the run is finished."""

    async def serve() -> None:
        assert context.client is not None
        address = own_address(context.config, context.group)
        async with gateway(context.run, context.incarnation, address) as there:
            context.report_phase("")
            telling = asyncio.create_task(_tell(context, there.front))
            over = asyncio.ensure_future(asyncio.wrap_future(context.client.status.run_finished()))
            try:
                with context.spans("wait", cause=_ASKED):
                    ends = [over, telling, there.serving]
                    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)

    run_until_stopped(serve, context.stop)


async def _tell(context: Context, front: Front) -> None:
    """Have the queue count, once in a while, for what reasons requests were refused; the log says
    how many."""
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
