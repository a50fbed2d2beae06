"""A pool of workers of one kind of work, each started when there is something to do and no place
for it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

from relax_hpc.net.workers.process import ATTEMPTS, Message, Worker, WorkerEnded
from relax_hpc.net.workers.starter import Starter

Q = TypeVar("Q", contravariant=True)
A = TypeVar("A")

_GRACE_S = 2.0
"""Seconds beyond the limit for a worker that keeps it by itself."""


class Work(Protocol[Q, A]):
    """Work of a pool: a module that does it in a worker, what passes between, and the answers to
    what went wrong."""

    name: str
    """Name in messages, such as `reward maths`."""
    module: str
    """Module that a worker runs."""
    limit_s: float
    """Seconds for a request."""
    watches_limit: bool
    """Whether a worker of one request at a time sends an answer when ``limit_s`` is over, see
    `is_late`. It cannot end the request, so that the pool ends the worker."""

    @property
    def setup(self) -> Message:
        """The first message to a worker."""

    def make_request(self, asked: Q) -> Message:
        """Message by which a worker is asked. TypeError, ValueError, RecursionError: there is
        none."""

    def read_answer(self, message: Message) -> A:
        """Answer that a worker's ``message`` is."""

    def answer_unsendable(self, error: Exception) -> A:
        """Answer where there is no such request."""

    def answer_late(self, took_s: float, answer: A | None) -> A:
        """Answer for a request that took too long. ``answer``: the worker's, for which `is_late`
        holds; None: the worker sent none, and was killed."""

    def answer_death(self, how: str) -> A:
        """Answer where a worker ended over a request."""

    def is_late(self, answer: A) -> bool:
        """Whether a worker says with ``answer`` that the request took too long."""


class WorkerPool(Generic[Q, A]):
    """Pool of up to ``count`` workers; for one event loop."""

    def __init__(self, work: Work[Q, A], count: int) -> None:
        self.work, self.count = work, count
        self.workers: list[Worker] = []
        self._starter = Starter(work.name, work.module, work.setup, work.read_answer)
        self._starting = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._numbers = itertools.count()
        self._suspects = asyncio.Lock()
        self._for_suspects: Worker | None = None

    async def start(self) -> None:
        """Start one worker. ConfigError: it cannot do this work."""
        self._leave(await self._place())

    async def run(self, asked: Q) -> A:
        """The answer to a request; if its worker failed, an answer that says how.

        If the worker dies, another one gets the request, twice at most. RelaxError: no worker can
        be started.
        """
        deaths = 0
        while True:
            worker = await self._place()
            try:
                return await self._asked(worker, asked, alone=worker.capacity == 1)
            except WorkerEnded as ended:
                deaths += ended.ended_itself
                if deaths == ATTEMPTS:
                    return self.work.answer_death(str(ended))
                if worker.capacity > 1:
                    break
            finally:
                self._leave(worker)
        return await self._retry_alone(asked, deaths)

    async def close(self) -> None:
        """End all workers."""
        workers = [*self.workers, *([self._for_suspects] if self._for_suspects else [])]
        await asyncio.gather(*(worker.end() for worker in workers))

    async def _retry_alone(self, asked: Q, deaths: int) -> A:
        """Answer to a request whose worker died with several requests in flight, of which one may
        have killed it. ``deaths``: times that the request's worker has died."""
        async with self._suspects:
            while True:
                if self._for_suspects is None or self._for_suspects.has_ended:
                    self._for_suspects = await self._starter.start()
                try:
                    return await self._asked(self._for_suspects, asked, alone=True)
                except WorkerEnded as ended:
                    deaths += ended.ended_itself
                    if deaths == ATTEMPTS:
                        return self.work.answer_death(str(ended))

    async def _asked(self, worker: Worker, asked: Q, alone: bool) -> A:
        """Answer of a worker, or how it failed at this. WorkerEnded: it died, or was suspended,
        which may be the fault of others."""
        begun = time.monotonic()
        watches_limit = worker.capacity > 1 or self.work.watches_limit
        limit_s = self.work.limit_s + (_GRACE_S if watches_limit else 0.0)
        try:
            async with asyncio.timeout(limit_s):
                answer = await worker.ask(next(self._numbers), self.work.make_request(asked))
        except TimeoutError:
            is_suspended = worker.is_suspended
            await worker.end()
            if is_suspended:
                raise WorkerEnded("was suspended by a signal", True) from None
            if not alone:
                raise WorkerEnded("did not answer", False) from None
            return self.work.answer_late(time.monotonic() - begun, None)
        except asyncio.CancelledError:
            if alone:
                # It is at what nobody waits for any more.
                worker.kill()
            raise
        except (TypeError, ValueError, RecursionError) as error:
            return self.work.answer_unsendable(error)
        if not self.work.is_late(answer):
            return answer
        if worker.capacity == 1:
            # It is still at this request.
            await worker.end()
        return self.work.answer_late(time.monotonic() - begun, answer)

    async def _place(self) -> Worker:
        """Worker with a free place, which is taken."""
        while not (worker := self._free()):
            if len(self.workers) + self._starting < self.count:
                self._starting += 1
                try:
                    worker = await self._starter.start()
                    self.workers.append(worker)
                finally:
                    self._starting -= 1
                    self._wake()
            else:
                await self._turn()
        worker.busy += 1
        return worker

    def _leave(self, worker: Worker) -> None:
        worker.busy -= 1
        self._wake()

    def _free(self) -> Worker | None:
        self.workers[:] = [worker for worker in self.workers if not worker.has_ended]
        free = [worker for worker in self.workers if worker.busy < worker.capacity]
        return min(free, key=lambda worker: worker.busy, default=None)

    async def _turn(self) -> None:
        """Wait until a place may be free."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake()
            raise

    def _wake(self) -> None:
        """Wake as many as there are places, and one more, to start a worker where one has ended."""
        places = 1 + sum(
            max(0, worker.capacity - worker.busy) for worker in self.workers if not worker.has_ended
        )
        while places and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                places -= 1
