"""The role genrm: SGLang servers of a generative reward model, for the reward `judge` of other
groups.

    reward worker --authenticated connection--> JudgeFront (this process) --HTTP, loopback--> SGLang

SGLang has an API key, but does not authenticate itself to its clients. Its servers therefore listen
only on the loopback address, where this process holds their ports, and this process accepts the
questions of other groups. Its endpoint is in the run directory. If one server ends, the group ends
and is restarted alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
"""Path of chat completions on a server."""
_REPORT_S = 0.5
"""Seconds between two reports of the phase of starting servers."""
_QUESTIONS = ("rollout", "questions")
"""Cause of its waits: SGLang does the work."""


def run(context: Context) -> None:
    """Serve until the run is finished."""

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            servers = [_server(context, number) for number in _numbers(context)]
            for server in servers:
                stack.push_async_callback(server.close)
            await _await_start(context, servers)
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
                with context.spans("wait", cause=_QUESTIONS):
                    await _await_end(context, servers, answering)
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)

    run_until_stopped(serve, context.stop)


class JudgeFront:
    """Forwards questions of other groups. Each question goes to the server of this process with the
    fewest open questions."""

    def __init__(self, servers: Sequence[ServerProcess]) -> None:
        self._servers = servers
        self._open_questions: Counter[str] = Counter()
        # There are no limits here, because clients limit the number and the time of their
        # questions.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
            auto_decompress=False,
        )

    async def serve(self, number: int, message: Message) -> Message:
        """Return status and body of a server's answer. ``number``, the number of the peer, is not
        used.

        aiohttp.ClientError: the server has ended. ValueError: the answer is too large, or
        ``message`` is not a question.
        """
        body = message["body"]
        if not isinstance(body, bytes):
            raise ValueError(f"found {type(body).__name__} as a question, allowed: bytes of JSON")
        server = min(self._servers, key=lambda server: self._open_questions[server.url])
        headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
        self._open_questions[server.url] += 1
        try:
            async with self._session.post(
                f"{server.url}{_CHAT}", data=body, headers=headers
            ) as reply:
                return {"status": reply.status, "body": await read_answer(reply)}
        finally:
            self._open_questions[server.url] -= 1

    async def close(self) -> None:
        """Close the connections to the servers."""
        await self._session.close()


def _numbers(context: Context) -> range:
    """Return the numbers of the servers of this process."""
    count = context.config.genrm.replicas // context.world.size
    return range(context.world.rank * count, (context.world.rank + 1) * count)


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


async def _await_start(context: Context, servers: list[ServerProcess]) -> None:
    """Return when all servers serve. ConfigError, RelaxError: one of them cannot start."""
    require_model(Path(context.config.genrm.path), "genrm.path")
    reporting = asyncio.create_task(_report_phases(context, servers))
    try:
        async with asyncio.TaskGroup() as tasks:
            for server in servers:
                tasks.create_task(_start(context, server))
    finally:
        reporting.cancel()
    context.report_phase("")


async def _report_phases(context: Context, servers: list[ServerProcess]) -> None:
    while True:
        phases = [server.phase for server in servers if server.phase]
        context.report_phase(phases[0] if phases else "starting servers")
        await asyncio.sleep(_REPORT_S)


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


async def _await_end(
    context: Context, servers: list[ServerProcess], answering: asyncio.Task[None]
) -> None:
    """Return when the run is finished. RelaxError: a server has ended before. An error of
    ``answering`` is raised, too."""
    assert context.client is not None
    over = asyncio.wrap_future(context.client.status.run_finished())
    ended = {server.session.ended: server for server in servers}
    futures: list[asyncio.Future[Any]] = [over, answering, *ended]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    if answering.done():
        answering.result()
    for future, server in ended.items():
        if future.done() and not over.done():
            raise RelaxError(f"{future.result()}{server.quoted_error()}; see {server.log}")
    over.result()
