"""Has a task play its episodes with an engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

from relax_hpc.base.error_origin import describe_error, locate_error
from relax_hpc.base.errors import RelaxError
from relax_hpc.queue.row_ids import MAX_ROWS
from relax_hpc.queue.row_schema import NO_VERSION
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    EngineFault,
    Episode,
    GenerateRequest,
    Generation,
    checked,
)
from relax_hpc.tasks import Task

Answer = Generation | BadAnswer


class Repeat(Exception):
    """Signal that an engine failed to answer, which is counted; it is to be asked again."""


class OwnTime:
    """Ends what runs in it once it has taken ``seconds``, without those in which an engine was
    asked."""

    def __init__(self, seconds: float) -> None:
        self._left, self._asked, self._since = seconds, 0, 0.0
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> OwnTime:
        self._since = _now()
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *about: Any) -> bool | None:
        return await self._timeout.__aexit__(*about)

    @property
    def is_over(self) -> bool:
        return self._timeout.expired()

    @contextlib.contextmanager
    def stands(self) -> Iterator[None]:
        """Stop the clock inside of the block; blocks of requests that are asked side by side may
        overlap."""
        if not self._asked:
            self._left -= _now() - self._since
            self._timeout.reschedule(None)
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1
            if not self._asked and not self._timeout.expired():
                self._since = _now()
                self._timeout.reschedule(self._since + max(0.0, self._left))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def in_time(
    playing: Awaitable[Generation | Episode], own: OwnTime, limit_s: float
) -> Answer | Episode:
    """The episode that ``playing`` makes, or why there is none. What others have written may raise
    anything."""
    try:
        async with own:
            made = await playing
        return sound(made)
    except BadAnswer as bad:
        return bad
    except TimeoutError as error:
        if own.is_over:
            return BadAnswer(
                "episode_timeout",
                f"not done in {limit_s:g} s of its own (rollout.episode_timeout_s)",
            )
        return BadAnswer("episode_exception", describe_error(error), locate_error(error))
    except (RelaxError, EngineFault, Repeat):
        raise
    except Exception as error:
        return BadAnswer("episode_exception", describe_error(error), locate_error(error))


async def play(
    task: Task,
    request: GenerateRequest,
    once: Callable[[GenerateRequest], Awaitable[Answer]],
    limit_s: float = math.inf,
) -> Answer | Episode:
    """One attempt at the prompt of ``request``; ``once`` asks the engine for one response.

    ``limit_s``: for an episode of the task's own, without what its responses take.

    A task that has its own way to play gets requests without a draft: what there is of a turn is no
    episode. What it raises costs the prompt group. Repeat: as ``once``.
    """
    if not task.makes("episode"):
        return await once(request)

    own = OwnTime(limit_s)

    async def ask(asked: GenerateRequest) -> Generation:
        with own.stands():
            answer = await once(dataclasses.replace(asked, draft=None))
        if isinstance(answer, BadAnswer):
            raise answer
        return answer

    made = await in_time(task.episode(dataclasses.replace(request, draft=None), ask), own, limit_s)
    if request.draft and not isinstance(made, BadAnswer):
        request.draft.ended = made
    return made


def sound(made: Generation | Episode) -> Generation | Episode:
    """``made`` itself. BadAnswer: its rows are none, or nobody sampled any of it."""
    rows = [row.generation for row in made.rows] if isinstance(made, Episode) else [made]
    if not 0 < len(rows) <= MAX_ROWS:
        raise BadAnswer(
            "wrong_count", f"found an episode of {len(rows)} rows, allowed 1 to {MAX_ROWS}"
        )
    sampled = [np.asarray(checked(row, sys.maxsize).token_versions) != NO_VERSION for row in rows]
    for row, mine in zip(rows, sampled, strict=True):
        if np.any(np.asarray(row.logprobs)[~mine]):
            raise BadAnswer(
                "wrong_count", "found a log-probability other than 0 of a token that nobody sampled"
            )
    if not any(mine.any() for mine in sampled):
        raise BadAnswer("wrong_count", "found no token that the policy has sampled")
    return made
