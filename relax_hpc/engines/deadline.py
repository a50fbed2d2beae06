"""Deadlines: of an engine that says nothing, and of code that knows of none, such as a user's reward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

T = TypeVar("T")


class Silence:
    """Ends requests to an engine that has said nothing for ``seconds``, to any of them.

    A long response is no silence, nor is one that waits in the engine for others to end. For one event loop.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._limits: set[asyncio.Timeout] = set()
        self._excuses = 0

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Of one request. TimeoutError: it was silent for too long."""
        async with asyncio.timeout_at(self._until()) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def heard(self) -> None:
        """The engine has said something."""
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(self._until())

    @contextmanager
    def excused(self) -> Iterator[None]:
        """For as long as the body takes it has nothing to say."""
        self._excuses += 1
        self.heard()
        try:
            yield
        finally:
            self._excuses -= 1
            self.heard()

    def _until(self) -> float | None:
        return None if self._excuses else asyncio.get_running_loop().time() + self.seconds


async def within(seconds: float, function: Callable[[], T]) -> T:
    """What `function` returns, in a thread of its own. TimeoutError: it takes longer, and its thread is left behind."""
    pool = ThreadPoolExecutor(1)
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.get_running_loop().run_in_executor(pool, function)
    finally:
        pool.shutdown(wait=False)
