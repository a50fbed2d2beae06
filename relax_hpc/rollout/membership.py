"""Engines of a process that leave and join during the run, as `rollout.without` changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_hpc.config import load_resolved
from relax_hpc.config.changes import change_files
from relax_hpc.queue.process_context import Context
from relax_hpc.rollout.engines.pool import EngineId, EnginePool
from relax_hpc.rollout.external.member import ExternalMember
from relax_hpc.rollout.replica import Replica

_POLL_S = 2.0
"""Seconds between two checks for changes, which are files on a shared filesystem."""


class Membership:
    """The engines of the configuration that should serve, and the pool of those that do."""

    def __init__(
        self,
        context: Context,
        configured: Sequence[EngineId],
        pool: EnginePool[Replica | ExternalMember],
    ) -> None:
        self._context, self._configured, self._pool = context, configured, pool
        self._without = set(context.config.rollout.without)
        # The process has read its settings before. A change since then counts at the first check.
        self._read_changes: list[str] = []

    def wanted(self) -> list[EngineId]:
        """Engines that should serve."""
        group = self._context.group
        return [
            engine for engine in self._configured if f"{group}/{engine.number}" not in self._without
        ]

    async def follow(self) -> None:
        """Follow the changes of the run from now on."""
        while True:
            await asyncio.sleep(min(_POLL_S, self._context.config.liveness.beat_s))
            try:
                await asyncio.to_thread(self._read)
            except OSError as error:
                print(f"rollout.without stays as it is: {error}", flush=True)
            self._apply()

    def _list_changes(self) -> list[str]:
        return [path.name for path in change_files(self._context.run, self._context.group)]

    def _read(self) -> None:
        changes = self._list_changes()
        if changes != self._read_changes:
            without = load_resolved(self._context.run.root, self._context.group).rollout.without
            self._read_changes, self._without = changes, set(without)

    def _apply(self) -> None:
        """Let engines join, and let others leave once all wanted engines serve: a pool without
        engines ends."""
        serving, wanted = self._pool.members, self.wanted()
        if not serving:
            return
        for engine in wanted:
            if engine.number not in serving:
                print(f"engine {engine.number} joins", flush=True)
                self._pool.join(engine)
        wanted_numbers = {engine.number for engine in wanted}
        if any(serving[number].leaving.is_set() for number in wanted_numbers):
            return
        # External engines have other numbers, and leave when the hub requests it.
        configured_numbers = {engine.number for engine in self._configured}
        for number in (serving.keys() & configured_numbers) - wanted_numbers:
            if not serving[number].leaving.is_set():
                print(f"engine {number} leaves: rollout.without", flush=True)
                self._pool.remove(number)
