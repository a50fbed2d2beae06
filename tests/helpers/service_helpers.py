"""The HTTP service of a run for tests, over a hub in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.net.http_limits import HttpLimits
from relax_hpc.queue.client import QueueClient
from relax_hpc.service.app import Server, make_app
from relax_hpc.service.live_run import LiveRun
from relax_hpc.service.role import all_routes
from tests.helpers.queue_helpers import in_thread, make_run, small

TOKEN = "token-of-the-run"
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and JSON content of an answer."""

    status: int
    content: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        """Code of an error; empty: it is none."""
        error = self.content.get("error", {}) if isinstance(self.content, dict) else {}
        return error.get("code", "")


@dataclass(slots=True)
class Service:
    """A service that serves, and the client of a supervisor."""

    run: RunDir
    live: LiveRun
    limits: HttpLimits
    url: str
    supervisor: QueueClient
    session: aiohttp.ClientSession

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        token: str = TOKEN,
        data: bytes | None = None,
        **headers: str,
    ) -> Answer:
        """Send a request. ``data``: a body that need not be JSON."""
        if token:
            headers["Authorization"] = f"Bearer {token}"
        async with self.session.request(
            method, self.url + path, json=body, data=data, headers=headers
        ) as reply:
            text = await reply.text()
            content = json.loads(text) if "json" in reply.content_type else text
            return Answer(reply.status, content, dict(reply.headers))


@contextlib.asynccontextmanager
async def service(
    path: Path,
    config: Config | None = None,
    routes: Iterable[web.AbstractRouteDef] | None = None,
    with_hub: bool = True,
) -> AsyncIterator[Service]:
    """A service of a run in ``path`` with all routes, or with ``routes``. Its hub runs in a thread,
    and its supervisor has reported one group of one engine."""
    run, config = make_run(path), config or small()
    with contextlib.ExitStack() as stack:
        if with_hub:
            stack.enter_context(in_thread(run, config))
        client = stack.enter_context(QueueClient(run, config, "hub", 1, "api"))
        supervisor = stack.enter_context(QueueClient(run, config, "supervisor", 1))
        live, limits = LiveRun(run, config, client), HttpLimits()
        listening = socket.create_server(("127.0.0.1", 0))
        chosen = all_routes(live) if routes is None else routes
        server = Server(make_app(live, TOKEN, chosen, limits), listening)
        await server.start()
        following = asyncio.create_task(live.follow())
        if with_hub:
            report = supervisor.operations.report_groups({"rollout": {"engines": 1}})
            await asyncio.wrap_future(report)
        try:
            async with aiohttp.ClientSession() as session, asyncio.timeout(LIMIT_S):
                url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                yield Service(run, live, limits, url, supervisor, session)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await server.close()
