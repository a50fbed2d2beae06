"""The way into an engine: any number of requests at a time; while it is updated, new ones wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class UpdateGate:
    """Counts the requests in an engine. Make it inside a running event loop.

    Those that waited for an update go on in one turn of the loop, so that they can be asked
    together.
    """

    def __init__(self) -> None:
        self.inside = 0
        """Requests that have entered and not left."""
        self._updates = asyncio.Lock()
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()

    async def enter(self) -> None:
        """Return once no update goes on; `leave` must follow."""
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
        """Let nobody in during the body, which begins at once or ``when_empty``."""
        async with self._updates:
            self._open.clear()
            try:
                if when_empty:
                    await self._empty.wait()
                yield
            finally:
                self._open.set()
