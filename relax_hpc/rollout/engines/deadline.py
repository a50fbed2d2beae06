"""The deadline of an engine that says nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any


class Silence:
    """Ends requests to an engine that has said nothing for ``seconds``, to any of them.

    A long response is no silence, nor is one that waits in the engine for others to end. For one
    event loop. What is heard costs the same however many requests wait: one timer looks after all
    of them.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begun: dict[Limited, float] = {}
        """Requests, the oldest first -> when each began."""
        self._heard = -math.inf
        self._excuses = 0
        self._timer: asyncio.TimerHandle | None = None

    def limited(self) -> Limited:
        """`with` it around one request. TimeoutError: it was silent for too long."""
        return Limited(self)

    def heard(self) -> None:
        """Note that the engine has said something."""
        self._heard = asyncio.get_running_loop().time()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Expect nothing of the engine while the body runs: its silence does not count."""
        self._excuses += 1
        try:
            yield
        finally:
            self._excuses -= 1
            self.heard()
            self._arm()

    def begin(self, limit: Limited) -> None:
        """Note that a request begins, which ``limit`` would end."""
        self._begun[limit] = asyncio.get_running_loop().time()
        self._arm()

    def end(self, limit: Limited) -> None:
        """Note that the request of ``limit`` has ended."""
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
            silent = [
                limit
                for limit, begun in self._begun.items()
                if max(begun, self._heard) + self.seconds <= now
            ]
            for limit in silent:
                del self._begun[limit]
                limit.expire()
        self._arm()


class Limited:
    """See `Silence.limited`: as `asyncio.timeout`, for less, as each response of an engine pays for
    it."""

    __slots__ = ("_before", "_ended", "_silence", "_task")

    def __init__(self, silence: Silence) -> None:
        self._silence, self._ended = silence, False
        self._task: asyncio.Task[Any]
        self._before = 0
        """Requests to cancel the task that were made by others before."""

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._silence.begin(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._silence.end(self)
        if self._ended and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """End the request."""
        self._ended = True
        self._task.cancel()
