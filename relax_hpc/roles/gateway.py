"""The role gateway, in the hub's group: the endpoint of agent programs, see
`relax_hpc.rollout.agents.gateway`."""

from __future__ import annotations

import asyncio

from relax_hpc.net.rendezvous.network import own_address
from relax_hpc.queue.process_context import Context
from relax_hpc.roles.event_loop import run_until_stopped
from relax_hpc.roles.refusals import report_refusals
from relax_hpc.rollout.agents.gateway.serving import gateway

_AGENT_REQUESTS = ("rollout", "requests of agents")
"""Cause of its waits: the engines do the work."""


def run(context: Context) -> None:
    """Serve until the run is finished."""

    async def serve() -> None:
        assert context.client is not None
        address = own_address(context.config, context.group)
        async with gateway(context.run, context.incarnation, address) as service:
            context.report_phase("")
            reporting = asyncio.create_task(
                report_refusals(context.client.status, "gateway", service.front.refused)
            )
            over = asyncio.ensure_future(asyncio.wrap_future(context.client.status.run_finished()))
            try:
                with context.spans("wait", cause=_AGENT_REQUESTS):
                    ends = [over, reporting, service.serving]
                    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)

    run_until_stopped(serve, context.stop)
