"""Environments in separate processes, many in each. If an environment hangs or crashes its process,
only its own episode fails. The other episodes of that process are replayed in another process, and
the replay is compared with the original messages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Coroutine
from typing import Any

from relax_hpc.base.error_origin import ErrorOrigin
from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.environments.base import Beginning, EnvironmentFault, Message, Response, Step
from relax_hpc.environments.process import EnvironmentProcess, ProcessLost
from relax_hpc.environments.wire import Wire, beginning_to_wire, step_from_wire
from relax_hpc.net.workers.process import ATTEMPTS
from relax_hpc.net.workers.starter import Starter

Turn = tuple[Step, tuple[Message, ...]]
"""Step after a response, without its observations, and the observations as messages."""


class Environments:
    """All environments of one rollout process; for one event loop."""

    def __init__(self, kind: str, settings: EnvironmentConfig) -> None:
        self._settings = settings
        setup = {
            "kind": kind,
            "options": settings.options,
            "limit_s": settings.step_timeout_s,
            "memory_mb": settings.memory_mb,
        }
        self._starter = Starter(f"environment {kind}", "relax_hpc.environments.worker", setup, dict)
        self._capacity = asyncio.Semaphore(settings.processes * settings.per_process)
        self._numbers = itertools.count()
        self._processes: list[EnvironmentProcess] = []
        self._retired: list[EnvironmentProcess] = []
        self._for_suspects: EnvironmentProcess | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start one process. ConfigError: the environment does not exist, or cannot be made with
        its options."""
        await self._choose_process().await_start()

    async def open(self, beginning: Beginning) -> EnvironmentSession:
        """A new environment that has begun its episode. Waits until there is capacity for it.
        EnvironmentFault."""
        await self._capacity.acquire()
        session = EnvironmentSession(self, next(self._numbers), beginning)
        try:
            await session.begin()
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """End all processes. Episodes in progress end as `environment_died`."""
        self._is_closed = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        suspects = [self._for_suspects] if self._for_suspects else []
        await asyncio.gather(
            *(process.end() for process in [*self._processes, *self._retired, *suspects])
        )

    def assign_process(self, is_suspect: bool) -> EnvironmentProcess:
        """Process for one more environment. A suspect, which may have ended its last process, gets
        a process that runs one call at a time. EnvironmentFault: `close` was called."""
        if self._is_closed:
            raise EnvironmentFault("environment_died", "all environments were ended")
        if is_suspect:
            if self._for_suspects is None or self._for_suspects.has_ended:
                self._for_suspects = EnvironmentProcess(
                    self._starter, self._settings.step_timeout_s, one_at_a_time=True
                )
            return self._for_suspects
        return self._choose_process()

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Start ``work`` without waiting for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def release(self, process: EnvironmentProcess | None) -> None:
        """Release the capacity of an environment, whose last process was ``process``."""
        self._capacity.release()
        if process:
            process.environments -= 1
            is_unused = process in self._retired or process is self._for_suspects
            if is_unused and not process.environments:
                process.kill()

    def retire(self, process: EnvironmentProcess) -> None:
        """Assign no more environments to a process in which one hangs. The process ends with its
        last environment."""
        if process in self._processes:
            self._processes.remove(process)
            self._retired.append(process)
        self._retired = [old for old in self._retired if not old.has_ended]
        for old in self._retired[: -self._settings.processes]:
            old.kill()

    def _choose_process(self) -> EnvironmentProcess:
        """An empty process, or a new one if more are allowed, or the one with the fewest
        environments."""
        self._processes = [process for process in self._processes if not process.has_ended]
        chosen = min(self._processes, key=lambda process: process.environments, default=None)
        can_start = len(self._processes) < self._settings.processes
        if chosen is None or (chosen.environments and can_start):
            chosen = EnvironmentProcess(self._starter, self._settings.step_timeout_s)
            self._processes.append(chosen)
        return chosen


class EnvironmentSession:
    """One environment, independent of its process; made by `Environments.open`."""

    def __init__(self, host: Environments, number: int, beginning: Beginning) -> None:
        self._host, self._number, self._begun = host, number, beginning_to_wire(beginning)
        self._played: list[Wire] = []
        self._digests: list[str] = []
        self._process: EnvironmentProcess | None = None
        self._is_open = True
        self.opening: tuple[Message, ...] = ()
        """Messages that follow the prompt."""

    async def begin(self) -> None:
        """Begin the episode. EnvironmentFault."""
        _, self.opening = await self._play(None)

    async def step(self, response: Response) -> Turn:
        """Continue after ``response``. EnvironmentFault: the episode cannot continue. ConfigError:
        environments cannot be made here with these options."""
        fields = dataclasses.asdict(response)
        turn = await self._play(fields)
        self._played.append(fields)
        return turn

    async def close(self) -> None:
        """Close the environment, then release its capacity. This runs in the background, because
        the environment may still be busy with a step that has timed out."""
        if self._is_open:
            self._is_open = False
            self._host.run_in_background(self._end())

    async def _end(self) -> None:
        process = self._process
        try:
            if process and not process.has_ended:
                with contextlib.suppress(EnvironmentFault, ConfigError, ProcessLost):
                    await self._ask(process, {"do": "close"}, 1)
        finally:
            self._host.release(process)

    async def _play(self, response: Wire | None) -> Turn:
        """Send a response, None at the beginning. If the process has ended, the whole episode is
        replayed in another one first."""
        is_suspect, needs_replay, deaths = False, self._process is None, 0
        while True:
            if self._process is None or self._process.has_ended:
                self._process, needs_replay = self._host.assign_process(is_suspect), True
                self._process.environments += 1
            history = None
            if needs_replay:
                history = {"begun": self._begun, "played": self._played, "digests": self._digests}
            message = {"do": "play", "response": response, "history": history}
            calls = len(self._played) + 2 if needs_replay else 1
            try:
                answer = await self._ask(self._process, message, calls)
            except ProcessLost as lost:
                is_suspect = is_suspect or lost.was_under_way
                # The process may have been killed from outside, so that the episode is retried.
                deaths += lost.fault is not None
                if lost.fault and deaths == ATTEMPTS:
                    raise lost.fault from lost
            else:
                self._digests.append(answer["digest"])
                return step_from_wire(answer["step"])

    async def _ask(self, process: EnvironmentProcess, message: Wire, calls: int) -> dict[str, Any]:
        """Response of the process. EnvironmentFault. ConfigError: the environment cannot be made
        with its options. ProcessLost: the process ended, maybe because of another environment."""
        answer = await process.ask({"session": self._number, **message}, calls)
        if "error" in answer:
            raise ConfigError(answer["error"])
        if answer.get("stuck"):
            self._host.retire(process)
        fault = answer.get("fault")
        if fault:
            reason, detail, location, traceback = fault
            raise EnvironmentFault(reason, detail, ErrorOrigin(location, traceback))
        return answer


Session = EnvironmentSession  # Name in release 0.1.
