"""The newest known state of a run, in the memory of the service.

Handlers read it and never wait for the hub, except for operations. Its age is known, so that an
unreachable hub is visible.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from relax_hpc.base.errors import DeadlineError, RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.queue.client import QueueClient, QueueStatus
from relax_hpc.queue.client.operations import PresentReport, WantedState
from relax_hpc.queue.operations import OperationRefused
from relax_hpc.service.metrics_follower import MetricsFollower

POLL_S = 1.0
"""Seconds between two requests for the hub's status."""
HUB_S = 5.0
"""Seconds to wait for an answer of the hub."""
_WATCH_S = 20.0
"""Seconds of one request for a change of operations."""
_AWAY_S = 5.0
"""Age of the status in seconds above which the hub counts as away."""
Result = TypeVar("Result")


class HubAwayError(RelaxError):
    """The hub does not answer now."""


class LiveRun:
    """State of one run. `follow` keeps it new."""

    def __init__(self, run: RunDir, config: Config, client: QueueClient) -> None:
        self.run, self.config, self.client = run, config, client
        self.status: QueueStatus | None = None
        """Newest status of the hub; None: it has not answered yet."""
        self.present: PresentReport | None = None
        """Newest report of the groups with engines."""
        self.wanted = WantedState(revision=-1)
        """Unfinished operations, external engines, and tokens of members."""
        self.metrics = MetricsFollower(run.root)
        self.started_at = time.time()
        self.counts: Counter[str] = Counter()
        """Answered requests by HTTP status, and refused ones by reason, for the metrics."""
        self._answered_at = float("-inf")
        self._changed = asyncio.Event()

    @property
    def status_age_s(self) -> float:
        """Seconds since the hub's last answer; infinity: it has never answered."""
        return time.monotonic() - self._answered_at

    @property
    def is_hub_away(self) -> bool:
        return self.status_age_s > _AWAY_S

    async def follow(self) -> None:
        """Keep the state new until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat(self._poll_hub))
            tasks.create_task(self._repeat(self._watch_operations))
            tasks.create_task(self._repeat(self._poll_metrics))

    async def ask(self, future: Future[Result]) -> Result:
        """Answer of the hub to a request. HubAwayError: it does not answer. OperationRefused: it
        refuses the request."""
        try:
            async with asyncio.timeout(2 * HUB_S):
                return await asyncio.wrap_future(future)
        except OperationRefused as refusal:
            if refusal.code == "hub_away":
                raise HubAwayError(str(refusal)) from refusal
            raise
        except (RelaxError, TimeoutError) as error:
            raise HubAwayError(f"the hub of the run does not answer: {error}") from error

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until operations or external engines change, at most ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _repeat(self, update: Callable[[], Awaitable[float]]) -> None:
        """Call ``update`` repeatedly; it returns the seconds until its next call."""
        while True:
            try:
                pause_s = await update()
            except (RelaxError, OSError, ValueError) as error:
                self.counts[f"update_{type(error).__name__}"] += 1
                pause_s = POLL_S
            await asyncio.sleep(pause_s)

    async def _poll_hub(self) -> float:
        self.status = await self.ask(self.client.status.get(timeout=HUB_S))
        self._answered_at = time.monotonic()
        self.present = await self.ask(self.client.operations.present(timeout=HUB_S))
        return POLL_S

    async def _watch_operations(self) -> float:
        watching = self.client.operations.watch(self.wanted.revision, timeout=_WATCH_S)
        try:
            self.wanted = await asyncio.wrap_future(watching)
        except DeadlineError:
            return 0.0 if not self.is_hub_away else POLL_S
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return 0.0

    async def _poll_metrics(self) -> float:
        has_more = await asyncio.to_thread(self.metrics.poll)
        return 0.0 if has_more else POLL_S
