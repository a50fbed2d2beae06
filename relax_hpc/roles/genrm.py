"""The role genrm: SGLang servers of a generative reward model, which reward `judge` of other groups
asks.

    reward worker --proven connection--> JudgeFront (this process) --HTTP, loopback--> SGLang

SGLang has an API key, but proves nothing to its clients. So its servers listen on the loopback
address alone, where this process keeps their ports, and this process takes the questions of other
groups. Its endpoint is in the run directory. If one server ends, so does the group, which is then
started again alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.net.rendezvous.endpoints import Endpoint, publish_endpoints
from relax_hpc.net.rendezvous.network import LOOPBACK
from relax_hpc.net.transport.calls import CallListener
from relax_hpc.net.transport.exchange import Message
from relax_hpc.net.transport.listener import create_listening_socket
from relax_hpc.queue.process_context import Context
from relax_hpc.rewards.group_service import PURPOSE
from relax_hpc.rewards.service import read_answer
from relax_hpc.roles.event_loop import run_until_stopped
from relax_hpc.rollout.engines.engine import EngineFault, require_model
from relax_hpc.rollout.engines.sglang.client import SglangClient
from relax_hpc.rollout.engines.sglang.engine import judge_arguments
from relax_hpc.rollout.engines.sglang.process import START_FLOOR_S, Launch, ServerProcess
from relax_hpc.training.weights.subscriber import NOTHING

_CHAT = "/v1/chat/completions"
"""Path of chat completions at a server."""
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
            key = secrets.token_hex(32)
            front = JudgeFront(servers)
            stack.push_async_callback(front.close)
            listening = create_listening_socket(context.world.cards[context.world.rank]["address"])
            listener = CallListener(listening, key.encode(), PURPOSE, front.serve)
            folder = context.run.rendezvous(context.group)
            endpoints = [Endpoint(listener.endpoint, key)]
            await asyncio.to_thread(
                publish_endpoints, folder, context.incarnation, context.world.rank, endpoints
            )
            answering = asyncio.create_task(listener.run())
            try:
                with context.spans("wait", cause=_ASKED):
                    await _over(context, servers, answering)
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)

    run_until_stopped(serve, context.stop)


class JudgeFront:
    """Forwards questions of other groups, each to the server of this process with the fewest open
    questions."""

    def __init__(self, servers: Sequence[ServerProcess]) -> None:
        self._servers = servers
        self._asked: Counter[str] = Counter()
        # Without limits here: clients bound the number of their questions, and the time they wait.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
            auto_decompress=False,
        )

    async def serve(self, number: int, message: Message) -> Message:
        """Status and body of a server's answer. ``number``: number of the peer, which is not used.
        aiohttp.ClientError: the server has ended. ValueError: the answer is too large, or
        ``message`` is no question."""
        body = message["body"]
        if not isinstance(body, bytes):
            raise ValueError(f"found {type(body).__name__} as a question, allowed: bytes of JSON")
        server = min(self._servers, key=lambda server: self._asked[server.url])
        headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
        self._asked[server.url] += 1
        try:
            async with self._session.post(
                f"{server.url}{_CHAT}", data=body, headers=headers
            ) as reply:
                return {"status": reply.status, "body": await read_answer(reply)}
        finally:
            self._asked[server.url] -= 1

    async def close(self) -> None:
        """Close the connections to the servers."""
        await self._session.close()


def _numbers(context: Context) -> range:
    """Numbers of the servers of this process."""
    each = context.config.genrm.replicas // context.world.size
    return range(context.world.rank * each, (context.world.rank + 1) * each)


def _server(context: Context, number: int) -> ServerProcess:
    config = context.config
    server = ServerProcess(
        Launch(
            arguments=judge_arguments(config, number, LOOPBACK, number - _numbers(context)[0]),
            name=f"judge-{number}",
            logs=context.logs,
            threads=config.threads,
            stop_s=config.liveness.stop_timeout_s,
            flags="genrm.flags",
        )
    )
    if context.log_rotator:
        context.log_rotator.add(server.log)
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
    context.report_phase("")


async def _tell(context: Context, servers: list[ServerProcess]) -> None:
    while True:
        context.report_phase(
            next(filter(None, (server.phase for server in servers)), "starting servers")
        )
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


async def _over(
    context: Context, servers: list[ServerProcess], answering: asyncio.Task[None]
) -> None:
    """Return once the run is finished. RelaxError: a server has ended before. ``answering``: its
    error is raised."""
    assert context.client is not None
    over = asyncio.wrap_future(context.client.status.run_finished())
    ended = {server.session.ended: server for server in servers}
    await asyncio.wait([over, answering, *ended], return_when=asyncio.FIRST_COMPLETED)
    if answering.done():
        answering.result()
    for future, server in ended.items():
        if future.done() and not over.done():
            raise RelaxError(f"{future.result()}{server.quoted_error()}; see {server.log}")
    over.result()
