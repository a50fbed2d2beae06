"""A process of environments, from the moment on that it is to be started."""

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
"""Seconds beyond its limit for a process that ends what is over time by itself."""


class Lost(Exception):
    """Signal that a process has ended, maybe because of another environment."""

    def __init__(self, was_under_way: bool, fault: EnvironmentFault | None = None) -> None:
        super().__init__()
        self.was_under_way = was_under_way
        """Whether it ended over this call, or over one beside it."""
        self.fault = fault
        """Failure of this call, if no other call can have ended the process; None: another one
        can."""


class Process:
    """A process in which any number of environments live; for one event loop."""

    def __init__(self, starter: Starter, limit_s: float, one_at_a_time: bool = False) -> None:
        """``limit_s``: for a call. ``one_at_a_time``: calls are, so that it ends over the one that
        is under way."""
        self.environments = 0
        """Environments that live in it."""
        self._limit_s = limit_s
        self._turn = asyncio.Lock() if one_at_a_time else contextlib.nullcontext()
        self._numbers = itertools.count()
        self._under_way = self._at_its_end = 0
        self._starting = asyncio.create_task(starter.start())

    @property
    def has_ended(self) -> bool:
        if not self._starting.done():
            return False
        return (
            self._starting.cancelled()
            or bool(self._starting.exception())
            or self._starting.result().has_ended
        )

    async def begun(self) -> Worker:
        """Wait until it has begun. ConfigError, RelaxError: as `Starter.start`."""
        return await asyncio.shield(self._starting)

    async def ask(self, message: Wire, calls: int) -> dict[str, Any]:
        """Answer to ``message``, for which it calls an environment ``calls`` times.
        EnvironmentFault: that took too long. Lost: it has ended."""
        async with self._turn:
            worker = await self.begun()
            if worker.has_ended:
                raise Lost(was_under_way=False)
            self._under_way += 1
            try:
                async with asyncio.timeout(calls * self._limit_s + _GRACE_S):
                    return await worker.ask(next(self._numbers), message)
            except TimeoutError:
                is_suspended = worker.is_suspended
                fault = EnvironmentFault(
                    "environment_timeout", f"its process did not answer in {self._limit_s:g} s"
                )
                lost = await self._end_over(worker, fault)
                raise (lost.fault if lost.fault and not is_suspended else lost) from None
            except WorkerEnded as ended:
                fault = EnvironmentFault("environment_died", f"its process {ended}")
                raise await self._end_over(worker, fault if ended.ended_itself else None) from ended
            finally:
                self._under_way -= 1

    def kill(self) -> None:
        """End it; what was asked of it was not at fault."""
        if not self._starting.done():
            self._starting.cancel()
        elif not self.has_ended:
            self._starting.result().kill()

    async def end(self) -> None:
        """End it, and wait until it is gone."""
        self.kill()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await (await self._starting).end()

    async def _end_over(self, worker: Worker, fault: EnvironmentFault | None) -> Lost:
        """End it; returns the error of a call in flight, with ``fault`` if no other call can have
        been the reason."""
        # Of those that are told one after the other the last is not alone, either.
        self._at_its_end = self._at_its_end or self._under_way
        await worker.end()
        return Lost(was_under_way=True, fault=fault if self._at_its_end == 1 else None)
