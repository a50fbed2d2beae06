"""The slots of a simulated engine: a limited number of responses is generated concurrently, each at
its own pace. Further responses wait in a queue."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_hpc.data.generation import Draft, FinishReason, Generation


@dataclass(slots=True, eq=False)
class SimulatedResponse:
    """A response to generate. Its draft may have the first of its tokens already."""

    tokens: list[int]
    """All tokens of the response."""
    finish_reason: FinishReason
    draft: Draft
    pause_s: float
    """Seconds before each token."""
    generation: Generation | None = None
    """The whole response, once it is generated."""
    due: float = -math.inf
    """Time at which its next token is due, or since which it waits for a slot; seconds of the event
    loop's clock."""
    has_slot: bool = False
    waiter: _Waiter | None = None
    """The caller that waits for it; None: the caller was cancelled."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A caller that waits for several responses."""

    missing: int
    done: asyncio.Future[None]


class Slots:
    """The slots of one engine.

    One timer serves all of them, so that a token costs a few microseconds. An engine that measures
    the cost of other components must cost little itself.
    """

    def __init__(
        self, count: int, sample: Callable[[SimulatedResponse], Generation | None]
    ) -> None:
        """``sample`` generates the next token of a response, and returns the whole response after
        its last token."""
        self._sample = sample
        self._free = [0.0] * count
        """Heap of the times since which the free slots are free; seconds of the loop's clock."""
        self._queue: deque[SimulatedResponse] = deque()
        self._running: list[tuple[float, int, SimulatedResponse]] = []
        """Heap of the responses in slots; the response whose token is due next comes first."""
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, responses: Sequence[SimulatedResponse]) -> None:
        """Return when all responses are generated. A cancelled call frees its slots."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(len(responses), loop.create_future())
        now = loop.time()
        for response in responses:
            response.due, response.waiter = now, waiter
        self._queue += responses
        self._fill_slots()
        try:
            await waiter.done
        except asyncio.CancelledError:
            for response in responses:
                response.waiter = None
                self._free_slot(response)
            self._fill_slots()
            raise

    def _fill_slots(self) -> None:
        """Give the free slots to responses of the queue."""
        while self._free and self._queue:
            response = self._queue.popleft()
            if response.waiter:
                # Timers fire a little late. Counting from the time at which the slot became free
                # keeps these delays from adding up over responses.
                response.due = max(response.due, heapq.heappop(self._free))
                response.has_slot = True
                self._schedule_token(response)
        if self._running and (self._timer is None or self._running[0][0] < self._timer.when()):
            if self._timer:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(self._running[0][0], self._tick)

    def _schedule_token(self, response: SimulatedResponse) -> None:
        response.due += response.pause_s
        heapq.heappush(self._running, (response.due, next(self._numbers), response))

    def _free_slot(self, response: SimulatedResponse) -> None:
        if response.has_slot:
            response.has_slot = False
            heapq.heappush(self._free, min(response.due, asyncio.get_running_loop().time()))

    def _tick(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        while self._running and self._running[0][0] <= now:
            *_, response = heapq.heappop(self._running)
            if not response.has_slot:
                continue
            generation = self._sample(response)
            if generation:
                self._free_slot(response)
                response.generation = generation
                self._count_done(response.waiter)
            else:
                self._schedule_token(response)
        self._fill_slots()

    @staticmethod
    def _count_done(waiter: _Waiter | None) -> None:
        """Count one of the responses of ``waiter`` as generated."""
        if waiter:
            waiter.missing -= 1
            if not waiter.missing and not waiter.done.done():
                waiter.done.set_result(None)
