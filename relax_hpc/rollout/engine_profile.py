"""Traces of an engine by its own profiler, see `profile.steps`."""

from __future__ import annotations

import asyncio

from relax_hpc.base.terminal_text import log_entry
from relax_hpc.config.profiling import ENGINES, ProfilePlan
from relax_hpc.queue.process_context import Context
from relax_hpc.rollout.engines.engine import Engine, EngineFault, ProfiledEngine


class EngineProfile:
    """Starts and ends the trace of one engine. A fault is printed to the log, and generation
    continues."""

    def __init__(self, context: Context, number: int) -> None:
        self._context, self._number = context, number
        self._plan = ProfilePlan(context.run, context.config, context.group, ENGINES, number)
        self._engine: ProfiledEngine | None = None
        """Engine that records now."""

    async def reach(self, step: int, engine: Engine) -> None:
        """The engine begins to generate prompt groups of ``step``."""
        if self._engine is None:
            await asyncio.to_thread(self._plan.refresh)
        elif step > self._plan.last_step:
            await self.close(engine)
        if self._engine is None and self._plan.includes(step):
            await self._start(step, engine)

    async def close(self, engine: Engine) -> None:
        """Write the trace if ``engine`` records one. An engine that has replaced the recording one
        has no trace."""
        recording, self._engine = self._engine, None
        if recording is None:
            return
        self._plan.finish()
        if recording is engine:
            try:
                await recording.stop_profile()
            except EngineFault as fault:
                self._give_up(str(fault))

    async def _start(self, step: int, engine: Engine) -> None:
        if not isinstance(engine, ProfiledEngine):
            self._give_up(f"engine {engine.name} has no profiler")
            return
        folder = self._context.run.profiles
        name = f"engine-{self._number}-steps-{step}-{self._plan.last_step}"
        try:
            await asyncio.to_thread(folder.mkdir, exist_ok=True)
            full_name = f"{name}.i{self._context.incarnation:06d}"
            await engine.start_profile(folder, full_name, self._plan.settings)
            self._engine = engine
        except (EngineFault, OSError) as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        print(log_entry(f"profile.steps: no trace of engine {self._number}: {reason}"), flush=True)
        self._plan.finish()
