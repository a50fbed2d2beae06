"""The way into an engine: any number of requests at a time; while it is updated, new ones wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Door:
    """Make it inside a running event loop."""

    def __init__(self) -> None:
        self.inside = 0
        """Requests that have come in and not left."""
        self._entry = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Come in, once no update goes on, for as long as the body takes."""
        async with self._entry:
            self.inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._empty.set()

    @asynccontextmanager
    async def update(self, when_empty: bool) -> AsyncIterator[None]:
        """Let nobody in during the body, which begins at once or ``when_empty``."""
        async with self._entry:
            if when_empty:
                await self._empty.wait()
            yield
