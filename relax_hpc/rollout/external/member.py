"""A member of the engine pool for one external engine: it joins, is lost, and is retried."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from relax_hpc.base.terminal_text import log_entry
from relax_hpc.rollout.engines.engine import EngineFault
from relax_hpc.rollout.external.engine import ExternalAddress
from relax_hpc.rollout.external.preflight import JoinRefused
from relax_hpc.rollout.external.replica import ExternalReplica
from relax_hpc.rollout.external.shared_versions import SharedVersions

if TYPE_CHECKING:
    from relax_hpc.rollout.rollout_rank import Rollout

JOINING, ACTIVE, DRAINING, LOST, LEFT = "joining", "active", "draining", "lost", "left"
"""States of an external engine."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 300.0
_STABLE_S = 300.0
"""Seconds of service after which the next loss counts as the first one again."""


class ReportState(Protocol):
    """Reports the state of an engine to the hub."""

    def __call__(
        self,
        number: int,
        state: str,
        phase: str = "",
        reason: str = "",
        detail: str = "",
        next_try: float = 0.0,
    ) -> None:
        """``phase``: of a join. ``reason``: code of a loss or a refusal, which ``detail`` explains.
        ``next_try``: time of the next join of a lost engine, in seconds of the wall clock."""


class Backoff:
    """Pauses between two joins of one engine: 1, 2, 4 ... 300 s."""

    def __init__(self) -> None:
        self._next_s = _FIRST_BACKOFF_S

    def pause_s(self, served_s: float) -> float:
        """Pause after a loss. ``served_s``: time for which the engine served before."""
        if served_s >= _STABLE_S:
            self._next_s = _FIRST_BACKOFF_S
        pause = self._next_s
        self._next_s = min(_LONGEST_BACKOFF_S, 2 * pause)
        return pause


class ExternalMember:
    """Member of an `EnginePool`. It stays in the pool while its engine is lost, so that the pool
    does not end with its last engine."""

    def __init__(
        self,
        rollout: Rollout,
        number: int,
        find_address: Callable[[], ExternalAddress],
        shared: SharedVersions,
        report: ReportState,
    ) -> None:
        """``number``: of the engine in its group. ``find_address``: its address now, read again for
        each join."""
        self.rollout, self.number, self._shared = rollout, number, shared
        self._find_address, self._report = find_address, report
        self.leaving = asyncio.Event()
        """Event that is set when the engine takes no more work and is not retried."""
        self.replica: ExternalReplica | None = None
        """The present replica; None: the engine is lost, or has not joined yet."""

    @property
    def started(self) -> bool:
        """Whether the engine has started, see `Replica.started`."""
        return self.replica is not None and self.replica.started

    def start_leaving(self) -> None:
        """Take no more work. `serve` ends when unfinished work is in the log."""
        self.leaving.set()
        if self.replica:
            self._report(self.number, DRAINING)
            self.replica.leaving.set()

    async def serve(self) -> None:
        """Join, and join again after each loss, until the engine leaves, is refused, or the run is
        finished."""
        backoff, failure = Backoff(), ("", "")
        while not self.leaving.is_set():
            address = await asyncio.to_thread(self._find_address)
            self.replica = ExternalReplica(self.rollout, address, self._shared, self._report_phase)
            await self.replica.serve()
            replica, self.replica = self.replica, None
            error = replica.loss
            if error is None:
                failure = "", ""
                break
            failure = failure_of(error)
            self._note(error, failure[0])
            if isinstance(error, JoinRefused):
                break
            served_s = time.monotonic() - replica.active_since if replica.active_since else 0.0
            pause_s = backoff.pause_s(served_s)
            reason, detail = failure
            next_try = time.time() + pause_s
            self._report(self.number, LOST, "", reason, detail, next_try)
            await self._wait_leaving(pause_s)
        self._report(self.number, LEFT, "", *failure)

    async def _wait_leaving(self, limit_s: float) -> None:
        waiting = asyncio.create_task(self.leaving.wait())
        await asyncio.wait([waiting], timeout=limit_s)
        waiting.cancel()

    def _report_phase(self, phase: str) -> None:
        if phase:
            self._report(self.number, JOINING, phase)
        else:
            self._report(self.number, ACTIVE)

    def _note(self, error: EngineFault | JoinRefused, reason: str) -> None:
        """Count a loss or a refusal in the queue, and name it in the log of the role."""
        is_refusal = isinstance(error, JoinRefused)
        name = f"{self.rollout.context.group}/{self.number}"
        kind = "engine_refused" if is_refusal else "engine_lost"
        self.rollout.client.status.note(kind, name, reason)
        verb = "may not join" if is_refusal else "is lost"
        print(log_entry(f"external engine {name} {verb}: {error}"), flush=True)


def failure_of(error: EngineFault | JoinRefused) -> tuple[str, str]:
    """Code and description of the end of an engine's service."""
    if isinstance(error, JoinRefused):
        return error.code, error.detail
    return error.reason, str(error)
