"""The role genrm: SGLang servers of a generative reward model, which reward `judge` of other groups asks.

It has nothing of the queue's but the word that the run is over. Its servers say in the run directory where they are;
the end of one is that of the group, which is started again by itself while the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from relax_hpc.engines.engine import EngineFault, require_model
from relax_hpc.engines.sglang.client import SglangClient
from relax_hpc.engines.sglang.engine import judge_arguments
from relax_hpc.engines.sglang.process import START_FLOOR_S, Launch, ServerProcess
from relax_hpc.errors import RelaxError
from relax_hpc.models.sizes import read_seconds
from relax_hpc.rendezvous.endpoints import Endpoint, publish_endpoints
from relax_hpc.roles.context import Context
from relax_hpc.roles.event_loop import run_until_stopped
from relax_hpc.weights.subscriber import NOTHING

_TELL_S = 0.5
"""Seconds between two looks at what servers that start are doing."""
_ASKED = ("rollout", "questions")
"""Cause of its waits: work is SGLang's."""


def run(context: Context) -> None:
    """Serve until the run is finished."""

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            servers = [_server(context, number) for number in _numbers(context)]
            for server in servers:
                stack.push_async_callback(server.close)
            await _started(context, servers)
            endpoints = [Endpoint(server.url, server.key) for server in servers]
            folder = context.run.rendezvous(context.group)
            await asyncio.to_thread(publish_endpoints, folder, context.incarnation, context.world.rank, endpoints)
            with context.spans("wait", cause=_ASKED):
                await _over(context, servers)

    run_until_stopped(serve, context.stop)


def _numbers(context: Context) -> range:
    """Numbers of the servers of this process."""
    each = context.config.genrm.replicas // context.world.size
    return range(context.world.rank * each, (context.world.rank + 1) * each)


def _server(context: Context, number: int) -> ServerProcess:
    config, world = context.config, context.world
    server = ServerProcess(
        Launch(
            arguments=judge_arguments(
                config, number, world.cards[world.rank]["address"], number - _numbers(context)[0]
            ),
            name=f"judge-{number}",
            logs=context.logs,
            threads=config.threads,
            stop_s=config.liveness.stop_timeout_s,
            flags="genrm.flags",
        )
    )
    if context.kept_short:
        context.kept_short.add(server.log)
    return server


async def _started(context: Context, servers: list[ServerProcess]) -> None:
    """Return when all serve. ConfigError, RelaxError: one never will."""
    require_model(Path(context.config.genrm.path), "genrm.path")
    telling = asyncio.create_task(_tell(context, servers))
    try:
        async with asyncio.TaskGroup() as tasks:
            for server in servers:
                tasks.create_task(_start(context, server))
    finally:
        telling.cancel()
    context.says("")


async def _tell(context: Context, servers: list[ServerProcess]) -> None:
    while True:
        context.says(next(filter(None, (server.phase for server in servers)), "starting servers"))
        await asyncio.sleep(_TELL_S)


async def _start(context: Context, server: ServerProcess) -> None:
    settings = context.config.genrm
    await server.start()
    client = SglangClient(server.url, server.key, context.config.rollout.engine, NOTHING)
    try:
        limit_s = settings.start_timeout_s or START_FLOOR_S + read_seconds(settings.path)
        await server.wait_healthy(client.healthy, limit_s)
    except EngineFault as fault:
        raise RelaxError(str(fault)) from fault
    finally:
        await client.close()


async def _over(context: Context, servers: list[ServerProcess]) -> None:
    """Return once the run is finished. RelaxError: a server has ended before."""
    assert context.client is not None
    over = asyncio.wrap_future(context.client.status.over())
    ended = {server.session.ended: server for server in servers}
    await asyncio.wait([over, *ended], return_when=asyncio.FIRST_COMPLETED)
    for future, server in ended.items():
        if future.done() and not over.done():
            raise RelaxError(f"{future.result()}{server.quoted_error()}; see {server.log}")
    over.result()
