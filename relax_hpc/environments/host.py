"""Environments in processes of their own, many in each. One that hangs, or ends its process, ends
its own episode; those beside it are played again in another process, and compared."""

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
from relax_hpc.environments.process import Lost, Process
from relax_hpc.environments.wire import Wire, beginning_to_wire, step_from_wire
from relax_hpc.net.workers.process import ATTEMPTS
from relax_hpc.net.workers.starter import Starter

Turn = tuple[Step, tuple[Message, ...]]
"""Step after a response, its observations left out, and these as messages to the policy."""


class Environments:
    """All environments of one process of rollout; for one event loop."""

    def __init__(self, kind: str, settings: EnvironmentConfig) -> None:
        self._settings = settings
        about = {
            "kind": kind,
            "options": settings.options,
            "limit_s": settings.step_timeout_s,
            "memory_mb": settings.memory_mb,
        }
        self._starter = Starter(f"environment {kind}", "relax_hpc.environments.worker", about, dict)
        self._places = asyncio.Semaphore(settings.processes * settings.per_process)
        self._numbers = itertools.count()
        self._processes: list[Process] = []
        self._retired: list[Process] = []
        self._for_suspects: Process | None = None
        self._beside: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start one process. ConfigError: there is no such environment, or not with these
        options."""
        await self._process().begun()

    async def open(self, beginning: Beginning) -> Session:
        """A new environment, begun, as soon as there is a place for it. EnvironmentFault."""
        await self._places.acquire()
        session = Session(self, next(self._numbers), beginning)
        try:
            await session.begin()
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """End all processes. Episodes that are still played end as `environment_died`."""
        self._is_closed = True
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        suspects = [self._for_suspects] if self._for_suspects else []
        await asyncio.gather(
            *(process.end() for process in [*self._processes, *self._retired, *suspects])
        )

    def place(self, is_suspect: bool) -> Process:
        """Process for one more environment; of a suspect, whose calls are the only ones there while
        they last. EnvironmentFault: they were all ended."""
        if self._is_closed:
            raise EnvironmentFault("environment_died", "all environments were ended")
        if is_suspect:
            if self._for_suspects is None or self._for_suspects.has_ended:
                self._for_suspects = Process(
                    self._starter, self._settings.step_timeout_s, one_at_a_time=True
                )
            return self._for_suspects
        return self._process()

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work`` while nobody waits for it."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def leave(self, process: Process | None) -> None:
        """Give the place back that an environment had, in ``process`` at last."""
        self._places.release()
        if process:
            process.environments -= 1
            if not process.environments and (
                process in self._retired or process is self._for_suspects
            ):
                process.kill()

    def retire(self, process: Process) -> None:
        """Let no more environments into a process that one hangs in; it ends with the others
        there."""
        if process in self._processes:
            self._processes.remove(process)
            self._retired.append(process)
        self._retired = [old for old in self._retired if not old.has_ended]
        for old in self._retired[: -self._settings.processes]:
            old.kill()

    def _process(self) -> Process:
        """The one with the fewest environments, or another."""
        self._processes = [process for process in self._processes if not process.has_ended]
        found = min(self._processes, key=lambda process: process.environments, default=None)
        if found is None or (
            found.environments and len(self._processes) < self._settings.processes
        ):
            found = Process(self._starter, self._settings.step_timeout_s)
            self._processes.append(found)
        return found


class Session:
    """One environment, wherever it lives; made by `Environments.open`."""

    def __init__(self, host: Environments, number: int, beginning: Beginning) -> None:
        self._host, self._number, self._begun = host, number, beginning_to_wire(beginning)
        self._played: list[Wire] = []
        self._digests: list[str] = []
        self._process: Process | None = None
        self._is_open = True
        self.opening: tuple[Message, ...] = ()
        """Messages that go behind the prompt."""

    async def begin(self) -> None:
        """Have the environment begin. EnvironmentFault."""
        _, self.opening = await self._play(None)

    async def step(self, response: Response) -> Turn:
        """Go on after ``response``. EnvironmentFault: the episode cannot go on. ConfigError: no
        environment can work here with its options."""
        said = dataclasses.asdict(response)
        found = await self._play(said)
        self._played.append(said)
        return found

    async def close(self) -> None:
        """Let the environment give back what it holds, and then its place to others. Nobody waits
        for that: it may be at a step that was given up."""
        if self._is_open:
            self._is_open = False
            self._host.beside(self._end())

    async def _end(self) -> None:
        process = self._process
        try:
            if process and not process.has_ended:
                with contextlib.suppress(EnvironmentFault, ConfigError, Lost):
                    await self._ask(process, {"do": "close"}, 1)
        finally:
            self._host.leave(process)

    async def _play(self, response: Wire | None) -> Turn:
        is_suspect, history, deaths = False, self._process is None, 0
        while True:
            if self._process is None or self._process.has_ended:
                self._process, history = self._host.place(is_suspect), True
                self._process.environments += 1
            known = {"begun": self._begun, "played": self._played, "digests": self._digests}
            try:
                about = {"do": "play", "response": response, "history": known if history else None}
                answer = await self._ask(
                    self._process, about, len(self._played) + 2 if history else 1
                )
            except Lost as lost:
                is_suspect = is_suspect or lost.was_under_way
                # Its process may have been killed from outside: it is played again, twice at most.
                deaths += lost.fault is not None
                if lost.fault and deaths == ATTEMPTS:
                    raise lost.fault from lost
            else:
                self._digests.append(answer["digest"])
                return step_from_wire(answer["step"])

    async def _ask(self, process: Process, message: Wire, calls: int) -> dict[str, Any]:
        """Answer of the process. EnvironmentFault. ConfigError: no environment can be had so. Lost:
        it ended, maybe over another environment."""
        answer = await process.ask({"session": self._number, **message}, calls)
        if "error" in answer:
            raise ConfigError(answer["error"])
        if answer.get("stuck"):
            self._host.retire(process)
        if fault := answer.get("fault"):
            reason, detail, location, traceback = fault
            raise EnvironmentFault(reason, detail, ErrorOrigin(location, traceback))
        return answer
