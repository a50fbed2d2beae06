"""Processes that compute rewards of one's own: what hangs or crashes there is killed and replaced, and costs its
prompt group alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Sequence

from relax_hpc.errors import RelaxError
from relax_hpc.reward_settings import RewardSettings
from relax_hpc.rewards import RewardError, RewardInput, Scores
from relax_hpc.rewards.worker_process import Worker, WorkerEnded

MOST_STARTS = 3
"""Starts in a row that may come to nothing."""
_GRACE_S = 2.0
"""Seconds beyond the limit for a worker that keeps it by itself."""


class Pool:
    """Pool of up to ``count`` workers for one reward, each started when there is work and no place for it.

    For one event loop.
    """

    def __init__(self, reward: str, count: int, limit_s: float, settings: RewardSettings | None = None) -> None:
        self.reward, self.count, self.limit_s = reward, count, limit_s
        self.settings = settings or RewardSettings()
        self.workers: list[Worker] = []
        self._starting = self._failed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._numbers = itertools.count()
        self._suspects = asyncio.Lock()
        self._for_suspects: Worker | None = None

    async def start(self) -> None:
        """Start one worker. ConfigError: there is no such reward."""
        self._leave(await self._place())

    async def of(self, samples: Sequence[RewardInput]) -> Scores:
        """The scores of a prompt group, or why there are none. RelaxError: no worker can be started."""
        worker = await self._place()
        try:
            return await self._asked(worker, samples, alone=worker.places == 1)
        except WorkerEnded:
            pass
        finally:
            self._leave(worker)
        # Whose fault it was shows when each of those that it had is asked for by itself.
        async with self._suspects:
            while True:
                if self._for_suspects is None or self._for_suspects.has_ended:
                    self._for_suspects = await self._started()
                with contextlib.suppress(WorkerEnded):
                    return await self._asked(self._for_suspects, samples, alone=True)

    async def close(self) -> None:
        """End all workers."""
        workers = [*self.workers, *([self._for_suspects] if self._for_suspects else [])]
        await asyncio.gather(*(worker.end() for worker in workers))

    async def _asked(self, worker: Worker, samples: Sequence[RewardInput], alone: bool) -> Scores:
        """Scores by a worker, or how it failed at these. WorkerEnded: that may be the fault of others."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self.limit_s + (_GRACE_S if worker.places > 1 else 0.0)):
                found = await worker.ask(next(self._numbers), samples)
        except TimeoutError:
            await worker.end()
            if not alone:
                raise WorkerEnded("did not answer", False) from None
            found = RewardError("reward_timeout", "")
        except WorkerEnded as ended:
            if not (alone and ended.by_itself):
                raise
            return RewardError("reward_died", f"the worker that computed it {ended}")
        except asyncio.CancelledError:
            if alone:
                # It is at what nobody waits for any more.
                worker.kill()
            raise
        except (TypeError, ValueError, RecursionError) as error:
            return RewardError("reward_exception", f"the prompt's row cannot be sent to a worker: {error}")
        if isinstance(found, RewardError) and found.reason == "reward_timeout":
            took = f"{time.monotonic() - begun:.1f} s, rollout.reward_timeout_s is {self.limit_s:g}"
            return RewardError("reward_timeout", f"given up after {took}")
        return found

    async def _place(self) -> Worker:
        """Worker with a free place, which is taken."""
        while not (worker := self._free()):
            if len(self.workers) + self._starting < self.count:
                self._starting += 1
                try:
                    worker = await self._started()
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
        free = [worker for worker in self.workers if worker.busy < worker.places]
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
        places = 1 + sum(max(0, worker.places - worker.busy) for worker in self.workers if not worker.has_ended)
        while places and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                places -= 1

    async def _started(self) -> Worker:
        while True:
            try:
                worker = await Worker.start(self.reward, self.limit_s, self.settings)
            except WorkerEnded as ended:
                self._failed += 1
                if self._failed >= MOST_STARTS:
                    text = f"a worker for reward {self.reward} {ended} while it started, {self._failed} times in a row"
                    raise RelaxError(f"{text}; what it printed is in the log of this role") from ended
            else:
                self._failed = 0
                return worker
