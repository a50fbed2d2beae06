"""A reward worker as the role sees it: its process, and what is asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from relax_hpc.errors import ConfigError
from relax_hpc.rendezvous.process import PARENT, clean_environment
from relax_hpc.reward_settings import RewardSettings
from relax_hpc.rewards import RewardError, RewardInput, Score, Scores, frames

START_S = 300.0
"""Seconds for a worker to import a reward and all that this imports, from a shared filesystem too."""


class WorkerEnded(Exception):
    """Error of a request to a worker that ended; it says how the worker ended."""

    def __init__(self, how: str, by_itself: bool) -> None:
        super().__init__(how)
        self.by_itself = by_itself
        """Whether it ended by itself while it was at what was asked of it, and nobody had ended it."""


class Worker:
    """Worker process of a reward, made by `start`; for one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, places: int) -> None:
        self.places = places
        """Prompt groups that it may have at a time."""
        self.busy = 0
        """Places that are taken."""
        self.has_ended = False
        """Whether nothing can be asked of it any more."""
        self._process = process
        self._asked: dict[int, asyncio.Future[Scores]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, reward: str, limit_s: float, settings: RewardSettings) -> Worker:
        """Start one for ``reward``. ConfigError: it says that there is none. WorkerEnded: it did not come to that."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relax_hpc.rewards.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Of its own, so that what it starts can be killed with it.
            start_new_session=True,
            env=clean_environment() | {PARENT: str(os.getpid())},
        )
        assert process.stdin and process.stdout
        try:
            async with asyncio.timeout(START_S):
                about = {"reward": reward, "limit_s": limit_s, "settings": dataclasses.asdict(settings)}
                process.stdin.write(frames.pack(about))
                first = await _message(process.stdout)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            raise WorkerEnded(await _end(process), True) from error
        except BaseException:
            await _end(process)
            raise
        if "error" in first:
            await _end(process)
            raise ConfigError(first["error"])
        return cls(process, first["at_once"] or 1)

    async def ask(self, number: int, samples: Sequence[RewardInput]) -> Scores:
        """The scores of ``samples``. WorkerEnded: see there. TypeError, ValueError: JSON has no such samples."""
        message = frames.pack({"id": number, "samples": [_fields(sample) for sample in samples]})
        if self.has_ended:
            raise WorkerEnded("had ended", False)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin
            self._process.stdin.write(message)
            return await answer
        finally:
            self._asked.pop(number, None)

    def kill(self) -> None:
        """End it, with all that it has started; what was asked of it was not at fault."""
        if self.has_ended:
            # Its number may be another process's by now.
            return
        self.has_ended = True
        self._reading.cancel()
        _kill(self._process)
        self._give_up("was ended because of another prompt", False)

    async def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        await self._process.wait()

    async def _read(self) -> None:
        assert self._process.stdout
        with contextlib.suppress(EOFError, OSError, ValueError, TypeError, LookupError):
            while True:
                message = await _message(self._process.stdout)
                if (answer := self._asked.get(message["id"])) and not answer.done():
                    answer.set_result(_scores(message))
        self.has_ended = True
        self._give_up(await _end(self._process), True)

    def _give_up(self, how: str, by_itself: bool) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(WorkerEnded(how, by_itself))


def _fields(sample: RewardInput) -> list[Any]:
    return [getattr(sample, field.name) for field in dataclasses.fields(RewardInput)]


def _scores(answer: dict[str, Any]) -> Scores:
    if "error" in answer:
        return RewardError(*answer["error"])
    return [Score(total, components) for total, components in answer["scores"]]


async def _message(reader: asyncio.StreamReader) -> Any:
    """Next message of a worker. EOFError: there is none any more. ValueError: it is none of ours."""
    try:
        return json.loads(await reader.readexactly(frames.size(await reader.readexactly(frames.HEAD.size))))
    except asyncio.IncompleteReadError:
        raise EOFError from None


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill it, and its whole process group: what it has started may have outlived it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> str:
    """Kill it, if it has not ended by itself; how it ended, in words."""
    _kill(process)
    code = await process.wait()
    if code >= 0:
        return f"ended by exit code {code}"
    why = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{why}"
