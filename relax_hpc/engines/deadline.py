"""The deadline of an engine that says nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class Silence:
    """Ends requests to an engine that has said nothing for ``seconds``, to any of them.

    A long response is no silence, nor is one that waits in the engine for others to end. For one event loop. What is
    heard costs the same however many requests wait: one timer looks after all of them.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begun: dict[asyncio.Timeout, float] = {}
        """Requests, the oldest first -> when each began."""
        self._heard = -math.inf
        self._excuses = 0
        self._timer: asyncio.TimerHandle | None = None

    def limited(self) -> Limited:
        """`async with` it around one request. TimeoutError: it was silent for too long."""
        return Limited(self)

    def heard(self) -> None:
        """The engine has said something."""
        self._heard = asyncio.get_running_loop().time()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """For as long as the body takes it has nothing to say."""
        self._excuses += 1
        try:
            yield
        finally:
            self._excuses -= 1
            self.heard()
            self._arm()

    def begin(self, limit: asyncio.Timeout) -> None:
        """A request begins that ``limit`` would end."""
        self._begun[limit] = asyncio.get_running_loop().time()
        self._arm()

    def end(self, limit: asyncio.Timeout) -> None:
        """It has ended."""
        self._begun.pop(limit, None)
        if not self._begun and self._timer:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._begun and not self._excuses:
            oldest = next(iter(self._begun.values()))
            due = max(oldest, self._heard) + self.seconds
            self._timer = asyncio.get_running_loop().call_at(due, self._look)

    def _look(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        if not self._excuses:
            silent = [limit for limit, begun in self._begun.items() if max(begun, self._heard) + self.seconds <= now]
            for limit in silent:
                del self._begun[limit]
                limit.reschedule(now)
        self._arm()


class Limited:
    """See `Silence.limited`; a class, and no generator: there is one for every response that an engine draws."""

    __slots__ = ("_limit", "_silence")

    def __init__(self, silence: Silence) -> None:
        self._silence, self._limit = silence, asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._silence.begin(self._limit)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._silence.end(self._limit)
        return await self._limit.__aexit__(kind, error, trace)
