"""A pool of workers for one kind of work. A worker starts when all present ones are busy."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

from relax_hpc.net.workers.process import ATTEMPTS, Message, Worker, WorkerEnded
from relax_hpc.net.workers.starter import Starter

Q = TypeVar("Q", contravariant=True)
"""Type of requests."""
A = TypeVar("A")
"""Type of answers."""

_GRACE_S = 2.0
"""Seconds beyond the limit for a worker that watches the limit."""


class Work(Protocol[Q, A]):
    """Work of a pool: the module of its workers, its messages, and its answers to failures."""

    name: str
    """Name in messages, such as `reward maths`."""
    module: str
    """Module that a worker runs."""
    limit_s: float
    """Seconds for a request."""
    watches_limit: bool
    """Whether a worker for one request at a time answers when ``limit_s`` is over, see `is_late`.
    It cannot end the request, so the pool ends the worker."""

    @property
    def setup(self) -> Message:
        """The first message to a worker."""

    def make_request(self, request: Q) -> Message:
        """Message for ``request``. TypeError, ValueError, RecursionError: it has none."""

    def read_answer(self, message: Message) -> A:
        """Answer from a worker's ``message``."""

    def answer_unsendable(self, error: Exception) -> A:
        """Answer to a request for which `make_request` raised ``error``."""

    def answer_late(self, took_s: float, answer: A | None) -> A:
        """Answer to a request that took too long. ``answer``: the worker's, for which `is_late` is
        true; None: the worker has not answered, and was killed."""

    def answer_death(self, description: str) -> A:
        """Answer to a request whose worker died. ``description``: how the worker ended."""

    def is_late(self, answer: A) -> bool:
        """Whether a worker's ``answer`` means that the request took too long."""


class WorkerPool(Generic[Q, A]):
    """Pool of up to ``count`` workers, for one event loop."""

    def __init__(self, work: Work[Q, A], count: int) -> None:
        self.work, self.count = work, count
        self.workers: list[Worker] = []
        self._starter = Starter(work.name, work.module, work.setup, work.read_answer)
        self._starting = 0
        """Number of workers that are being started."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Futures of requests that wait for a free worker, in order."""
        self._numbers = itertools.count()
        self._retry_lock = asyncio.Lock()
        self._retry_worker: Worker | None = None
        """Worker for requests that are retried alone, see `_retry_alone`."""

    async def start(self) -> None:
        """Start one worker. ConfigError: it cannot do this work."""
        self._release(await self._acquire())

    async def run(self, request: Q) -> A:
        """The answer to ``request``. If its worker fails, the answer describes the failure.

        If the worker dies, another one gets the request, twice at most. RelaxError: no worker can
        be started.
        """
        deaths = 0
        while True:
            worker = await self._acquire()
            try:
                return await self._send(worker, request, is_alone=worker.capacity == 1)
            except WorkerEnded as ended:
                deaths += ended.ended_itself
                if deaths == ATTEMPTS:
                    return self.work.answer_death(str(ended))
                if worker.capacity > 1:
                    break
            finally:
                self._release(worker)
        return await self._retry_alone(request, deaths)

    async def close(self) -> None:
        """End all workers."""
        workers = [*self.workers, *([self._retry_worker] if self._retry_worker else [])]
        await asyncio.gather(*(worker.end() for worker in workers))

    async def _retry_alone(self, request: Q, deaths: int) -> A:
        """Answer to a request whose worker died with several requests in flight.

        One of these requests may have killed the worker. Each is retried alone, to find the one
        that kills it. ``deaths``: number of workers of this request that have died.
        """
        async with self._retry_lock:
            while True:
                if self._retry_worker is None or self._retry_worker.has_ended:
                    self._retry_worker = await self._starter.start()
                try:
                    return await self._send(self._retry_worker, request, is_alone=True)
                except WorkerEnded as ended:
                    deaths += ended.ended_itself
                    if deaths == ATTEMPTS:
                        return self.work.answer_death(str(ended))

    async def _send(self, worker: Worker, request: Q, is_alone: bool) -> A:
        """Answer of ``worker``, or an answer that describes its failure with this request.

        WorkerEnded: it died or was suspended, possibly because of another request.
        """
        begin = time.monotonic()
        watches_limit = worker.capacity > 1 or self.work.watches_limit
        limit_s = self.work.limit_s + (_GRACE_S if watches_limit else 0.0)
        try:
            async with asyncio.timeout(limit_s):
                message = self.work.make_request(request)
                answer = await worker.ask(next(self._numbers), message)
        except TimeoutError:
            is_suspended = worker.is_suspended
            await worker.end()
            if is_suspended:
                raise WorkerEnded("was suspended by a signal", True) from None
            if not is_alone:
                raise WorkerEnded("did not answer", False) from None
            return self.work.answer_late(time.monotonic() - begin, None)
        except asyncio.CancelledError:
            if is_alone:
                # The worker cannot stop the request, whose answer is no longer needed.
                worker.kill()
            raise
        except (TypeError, ValueError, RecursionError) as error:
            return self.work.answer_unsendable(error)
        if not self.work.is_late(answer):
            return answer
        if worker.capacity == 1:
            # The worker is still working on this request.
            await worker.end()
        return self.work.answer_late(time.monotonic() - begin, answer)

    async def _acquire(self) -> Worker:
        """Reserve a place for a request at a worker. Starts one if all are busy."""
        while True:
            worker = self._find_free()
            if worker is not None:
                worker.busy += 1
                return worker
            if len(self.workers) + self._starting < self.count:
                await self._start_worker()
            else:
                await self._await_release()

    async def _start_worker(self) -> None:
        self._starting += 1
        try:
            self.workers.append(await self._starter.start())
        finally:
            self._starting -= 1
            self._wake()

    def _release(self, worker: Worker) -> None:
        worker.busy -= 1
        self._wake()

    def _find_free(self) -> Worker | None:
        """The least busy worker that accepts a request."""
        self.workers[:] = [worker for worker in self.workers if not worker.has_ended]
        free = [worker for worker in self.workers if worker.busy < worker.capacity]
        return min(free, key=lambda worker: worker.busy, default=None)

    async def _await_release(self) -> None:
        """Wait until a worker may be free."""
        release = asyncio.get_running_loop().create_future()
        self._waiting.append(release)
        try:
            await release
        except asyncio.CancelledError:
            if release.done() and not release.cancelled():
                # This request does not use the free place: wake another one.
                self._wake()
            raise

    def _wake(self) -> None:
        """Wake one waiting request for each free place, and one more.

        The additional request starts a worker if one has ended.
        """
        running = [worker for worker in self.workers if not worker.has_ended]
        count = 1 + sum(max(0, worker.capacity - worker.busy) for worker in running)
        while count and self._waiting:
            release = self._waiting.popleft()
            if not release.done():
                release.set_result(None)
                count -= 1
