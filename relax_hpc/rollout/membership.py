"""Engines of a process that leave and join while the run goes on, as `rollout.without` says at the
time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_hpc.config import load_resolved
from relax_hpc.config.changes import change_files
from relax_hpc.queue.process_context import Context
from relax_hpc.rollout.engines.pool import EngineId, EnginePool
from relax_hpc.rollout.replica import Replica

_LOOKS_S = 2.0
"""Seconds between two looks at the changes of the run, on a filesystem that everybody shares."""


class Membership:
    """The engines of the configuration that are to serve, and those that do."""

    def __init__(
        self, context: Context, configured: Sequence[EngineId], pool: EnginePool[Replica]
    ) -> None:
        self._context, self._configured, self._pool = context, configured, pool
        self._without = set(context.config.rollout.without)
        self._read = self._changes()

    def wanted(self) -> list[EngineId]:
        """Engines that are to serve."""
        group = self._context.group
        return [
            entry for entry in self._configured if f"{group}/{entry.number}" not in self._without
        ]

    async def follow(self) -> None:
        """Follow the changes of the run from now on."""
        while True:
            await asyncio.sleep(min(_LOOKS_S, self._context.config.liveness.beat_s))
            try:
                await asyncio.to_thread(self._look)
            except OSError as error:
                print(f"rollout.without stays as it is: {error}", flush=True)
            self._act()

    def _changes(self) -> list[str]:
        return [path.name for path in change_files(self._context.run, self._context.group)]

    def _look(self) -> None:
        if (found := self._changes()) != self._read:
            without = load_resolved(self._context.run.root, self._context.group).rollout.without
            self._read, self._without = found, set(without)

    def _act(self) -> None:
        """Some stay or come before others go, as a pool without engines is at its end."""
        serving, wanted = self._pool.members, self.wanted()
        for entry in wanted if serving else ():
            if entry.number not in serving:
                print(f"engine {entry.number} joins", flush=True)
                self._pool.join(entry)
        if all(
            entry.number in serving and not serving[entry.number].leaving.is_set()
            for entry in wanted
        ):
            for number in serving.keys() - {entry.number for entry in wanted}:
                if not serving[number].leaving.is_set():
                    print(f"engine {number} leaves: rollout.without", flush=True)
                    self._pool.remove(number)
