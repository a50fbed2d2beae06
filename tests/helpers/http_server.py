"""A small HTTP server of a test's own, on the loopback interface."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(path: str, answer: Answer) -> AsyncIterator[str]:
    """Its URL with ``path``, at which ``answer`` is given to what is posted."""
    app = web.Application()
    app.router.add_post(path, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}{path}"
    finally:
        await runner.cleanup()
