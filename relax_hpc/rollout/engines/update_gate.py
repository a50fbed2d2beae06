"""The gate of an engine: any number of requests may be inside. During an update, new ones wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class UpdateGate:
    """Counts the requests inside an engine. Create it inside a running event loop.

    All requests that wait for an update enter in one turn of the loop, so that they can be sent in
    one batch.
    """

    def __init__(self) -> None:
        self.inside = 0
        """Requests that have entered and not left."""
        self._updates = asyncio.Lock()
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()

    async def enter(self) -> None:
        """Return when no update is running. The caller must call `leave` afterwards."""
        while not self._open.is_set():
            await self._open.wait()
        self.inside += 1
        self._empty.clear()

    def leave(self) -> None:
        """Undo an `enter`."""
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    @asynccontextmanager
    async def update(self, when_empty: bool) -> AsyncIterator[None]:
        """Let no new request enter while the body runs. The body starts immediately, or, with
        ``when_empty``, after the last request has left."""
        async with self._updates:
            self._open.clear()
            try:
                if when_empty:
                    await self._empty.wait()
                yield
            finally:
                self._open.set()
