"""The places of a simulated engine: so many responses are drawn at a time, each at its own pace,
the others wait."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_hpc.rollout.engines.engine import Draft, Ended, Generation


@dataclass(slots=True, eq=False)
class Response:
    """Response that is to be drawn: all its tokens, of which those that `draft` has are drawn
    already."""

    tokens: list[int]
    ended_by: Ended
    draft: Draft
    pause_s: float
    """Seconds before each token."""
    made: Generation | None = None
    """Whole response, once it is drawn."""
    due: float = -math.inf
    """Time at which its next token is due, or since which it waits for a place; seconds of the
    event loop's clock."""
    seated: bool = False
    """Whether it has a place."""
    waiter: _Waiter | None = None
    """Waiter for it; None: it was given up."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """Waiter for several responses."""

    missing: int
    done: asyncio.Future[None]


class Places:
    """Places of one engine, in which responses are drawn at a time. One timer for all of them: a
    token costs a few microseconds, so that an engine that is to show what others cost costs little
    itself."""

    def __init__(self, count: int, sample: Callable[[Response], Generation | None]) -> None:
        """``sample`` draws the next token of a response; the whole of it, if that was the last."""
        self._sample = sample
        self._free = [0.0] * count
        """Times since which the free places are free, a heap; seconds of the event loop's clock."""
        self._line: deque[Response] = deque()
        self._drawn: list[tuple[float, int, Response]] = []
        """Responses that have a place, a heap: the next to get a token first."""
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def draw(self, responses: Sequence[Response]) -> None:
        """Return when all are made, once there were places and time has passed; cancelled, they
        leave their places."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(len(responses), loop.create_future())
        now = loop.time()
        for response in responses:
            response.due, response.waiter = now, waiter
        self._line += responses
        self._seat()
        try:
            await waiter.done
        except asyncio.CancelledError:
            for response in responses:
                response.waiter = None
                self._leave(response)
            self._seat()
            raise

    def _seat(self) -> None:
        """Give free places to who waits for one."""
        while self._free and self._line:
            response = self._line.popleft()
            if response.waiter:
                # Timers are a little late, which must not add up from one response to the next.
                response.due, response.seated = max(response.due, heapq.heappop(self._free)), True
                self._go_on(response)
        if self._drawn and (self._timer is None or self._drawn[0][0] < self._timer.when()):
            if self._timer:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(self._drawn[0][0], self._tick)

    def _go_on(self, response: Response) -> None:
        response.due += response.pause_s
        heapq.heappush(self._drawn, (response.due, next(self._numbers), response))

    def _leave(self, response: Response) -> None:
        if response.seated:
            response.seated = False
            heapq.heappush(self._free, min(response.due, asyncio.get_running_loop().time()))

    def _tick(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        while self._drawn and self._drawn[0][0] <= now:
            *_, response = heapq.heappop(self._drawn)
            if not response.seated:
                continue
            if made := self._sample(response):
                self._leave(response)
                response.made = made
                self._arrived(response.waiter)
            else:
                self._go_on(response)
        self._seat()

    @staticmethod
    def _arrived(waiter: _Waiter | None) -> None:
        """Count one of the responses that ``waiter`` waits for as made."""
        if waiter:
            waiter.missing -= 1
            if not waiter.missing and not waiter.done.done():
                waiter.done.set_result(None)
