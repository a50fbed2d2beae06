"""A process of environments, seen from the rollout process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

from relax_hpc.environments.base import EnvironmentFault
from relax_hpc.environments.wire import Wire
from relax_hpc.net.workers.process import Worker, WorkerEnded
from relax_hpc.net.workers.starter import Starter

_GRACE_S = 2.0
"""Seconds beyond the limit of a call. Normally the process itself ends a call that takes too
long."""


class ProcessLost(Exception):
    """A process has ended, maybe because of another environment."""

    def __init__(self, was_under_way: bool, fault: EnvironmentFault | None = None) -> None:
        super().__init__()
        self.was_under_way = was_under_way
        """Whether this call was in progress when the process ended."""
        self.fault = fault
        """Error of this call, if it was the only one in progress when the process ended; else
        None."""


class EnvironmentProcess:
    """A process with any number of environments; for one event loop."""

    def __init__(self, starter: Starter, limit_s: float, one_at_a_time: bool = False) -> None:
        """``limit_s``: time limit of a call. ``one_at_a_time``: run calls one after the other, so
        that it is known which call ends the process."""
        self.environments = 0
        """Number of environments in the process."""
        self._limit_s = limit_s
        self._turn = asyncio.Lock() if one_at_a_time else contextlib.nullcontext()
        self._numbers = itertools.count()
        self._calls = self._calls_at_end = 0
        """Calls in progress: now, and when the process ended."""
        self._starting = asyncio.create_task(starter.start())

    @property
    def has_ended(self) -> bool:
        if not self._starting.done():
            return False
        if self._starting.cancelled() or self._starting.exception():
            return True
        return self._starting.result().has_ended

    async def await_start(self) -> Worker:
        """Wait until the process has started. ConfigError, RelaxError: see `Starter.start`."""
        return await asyncio.shield(self._starting)

    async def ask(self, message: Wire, calls: int) -> dict[str, Any]:
        """Response to ``message``, which needs ``calls`` calls of an environment. EnvironmentFault:
        they took too long. ProcessLost: the process has ended."""
        async with self._turn:
            worker = await self.await_start()
            if worker.has_ended:
                raise ProcessLost(was_under_way=False)
            self._calls += 1
            try:
                async with asyncio.timeout(calls * self._limit_s + _GRACE_S):
                    return await worker.ask(next(self._numbers), message)
            except TimeoutError:
                is_suspended = worker.is_suspended
                fault = EnvironmentFault(
                    "environment_timeout", f"its process did not answer in {self._limit_s:g} s"
                )
                lost = await self._end_failed(worker, fault)
                # A suspended process is not the fault of the environment, so that the episode is
                # replayed.
                raise (lost.fault if lost.fault and not is_suspended else lost) from None
            except WorkerEnded as ended:
                fault = EnvironmentFault("environment_died", f"its process {ended}")
                lost = await self._end_failed(worker, fault if ended.ended_itself else None)
                raise lost from ended
            finally:
                self._calls -= 1

    def kill(self) -> None:
        """Kill the process. Calls in progress do not count as failed."""
        if not self._starting.done():
            self._starting.cancel()
        elif not self.has_ended:
            self._starting.result().kill()

    async def end(self) -> None:
        """End the process, and wait until it has ended."""
        self.kill()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await (await self._starting).end()

    async def _end_failed(self, worker: Worker, fault: EnvironmentFault | None) -> ProcessLost:
        """End the process after a failed call. Returns the error of that call, with ``fault`` if it
        was the only call in progress."""
        # Only the first failed call sets the number: later ones would find fewer calls.
        self._calls_at_end = self._calls_at_end or self._calls
        await worker.end()
        return ProcessLost(was_under_way=True, fault=fault if self._calls_at_end == 1 else None)
