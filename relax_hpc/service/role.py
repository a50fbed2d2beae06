"""The role api, in the hub's group: it serves `relax_hpc.service.app` until the run is finished."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from aiohttp import web

from relax_hpc.net.http_limits import HttpLimits
from relax_hpc.net.rendezvous.network import LOOPBACK, own_address
from relax_hpc.queue.process_context import Context
from relax_hpc.roles.event_loop import run_until_stopped
from relax_hpc.roles.refusals import report_refusals
from relax_hpc.service import members_routes, metrics_routes
from relax_hpc.service.address import ServiceAddress, make_token, publish_address, read_address
from relax_hpc.service.app import Server, make_app
from relax_hpc.service.autoscaler import routes as autoscaler_routes
from relax_hpc.service.autoscaler.loop import Autoscaler
from relax_hpc.service.live_run import LiveRun
from relax_hpc.service.operations_routes import operations_routes
from relax_hpc.service.page import routes as page

_CAUSE = ("hub", "requests of clients")
"""Cause of its waits."""


def run(context: Context) -> None:
    """Serve until the run is finished."""

    async def serve() -> None:
        client = context.client
        assert client is not None
        live = LiveRun(context.run, context.config, client)
        limits = HttpLimits()
        autoscaler = Autoscaler(live)
        async with serving(context, live, limits, autoscaler):
            context.report_phase("")
            over = asyncio.ensure_future(asyncio.wrap_future(client.status.run_finished()))
            tasks = [
                asyncio.create_task(live.follow()),
                asyncio.create_task(autoscaler.run()),
                asyncio.create_task(report_refusals(client.status, "api", limits.refused)),
            ]
            try:
                with context.spans("wait", cause=_CAUSE):
                    done, _ = await asyncio.wait([over, *tasks], return_when="FIRST_COMPLETED")
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    run_until_stopped(serve, context.stop)


def all_routes(live: LiveRun, autoscaler: Autoscaler | None = None) -> list[web.AbstractRouteDef]:
    """Routes of all parts of the service."""
    return [
        *page.routes(live),
        *metrics_routes.routes(live),
        *operations_routes(live),
        *members_routes.routes(live),
        *autoscaler_routes.routes(live, autoscaler or Autoscaler(live)),
    ]


@contextlib.asynccontextmanager
async def serving(
    context: Context,
    live: LiveRun,
    limits: HttpLimits,
    autoscaler: Autoscaler | None = None,
) -> AsyncIterator[str]:
    """Serve while the body runs; the address of the service. The address is published when the
    server listens."""
    former = await asyncio.to_thread(read_address, context.run)
    token = former.token if former else make_token()
    listening = _listen(context, former)
    server = Server(make_app(live, token, all_routes(live, autoscaler), limits), listening)
    await server.start()
    host, port = listening.getsockname()[:2]
    url = f"http://{host}:{port}"
    address = ServiceAddress(context.incarnation, socket.gethostname(), url, token)
    await asyncio.to_thread(publish_address, context.run, address)
    print(f"the service listens on {url}", flush=True)
    try:
        yield url
    finally:
        await server.close()


def _listen(context: Context, former: ServiceAddress | None) -> socket.socket:
    """A listening socket at the configured address: at the configured port, else at the former one
    if it is free, else at any port."""
    service = context.config.service
    is_on_site = service.address == "site"
    host = own_address(context.config, context.group) if is_on_site else LOOPBACK
    if service.port:
        return socket.create_server((host, service.port))
    if former and former.host == socket.gethostname():
        port = former.url.rpartition(":")[2]
        with contextlib.suppress(OSError, ValueError, OverflowError):
            return socket.create_server((host, int(port)))
    return socket.create_server((host, 0))
