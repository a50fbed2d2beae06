"""Episodes that tasks play with an engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from relax_hpc.base.error_origin import describe_error, locate_error
from relax_hpc.base.errors import RelaxError
from relax_hpc.data.generation import Episode, GenerateRequest, Generation
from relax_hpc.queue.row_ids import MAX_ROWS
from relax_hpc.queue.row_schema import NO_VERSION
from relax_hpc.rollout.engines.engine import BadAnswer, EngineFault, checked
from relax_hpc.tasks import Task

Answer = Generation | BadAnswer
E = TypeVar("E", bound=Generation | Episode)


class EngineRetry(Exception):
    """Signal that the engine has failed, and that the failure was counted. The caller should ask
    the engine again."""


class EpisodeTimer:
    """Cancels its body after ``seconds``. Time in `paused` blocks does not count."""

    def __init__(self, seconds: float) -> None:
        self._remaining_s, self._pauses, self._resumed_at = seconds, 0, 0.0
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> EpisodeTimer:
        self._resumed_at = _now()
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        # asyncio.Timeout never suppresses an error.
        await self._timeout.__aexit__(*error)
        return None

    @property
    def has_expired(self) -> bool:
        """Whether the timer has cancelled its body."""
        return self._timeout.expired()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the timer inside the block. Blocks of concurrent requests may overlap."""
        if not self._pauses:
            self._remaining_s -= _now() - self._resumed_at
            self._timeout.reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses and not self._timeout.expired():
                self._resumed_at = _now()
                self._timeout.reschedule(self._resumed_at + max(0.0, self._remaining_s))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def run_with_timer(
    playing: Awaitable[E], timer: EpisodeTimer, limit_s: float
) -> E | BadAnswer:
    """The episode that ``playing`` returns, or the reason why it failed. Users' code may raise any
    exception."""
    try:
        async with timer:
            episode = await playing
        check_episode(episode)
        return episode
    except BadAnswer as bad:
        return bad
    except TimeoutError as error:
        if timer.has_expired:
            return BadAnswer(
                "episode_timeout",
                f"took {limit_s:g} s without the time of responses (rollout.episode_timeout_s)",
            )
        return BadAnswer("episode_exception", describe_error(error), locate_error(error))
    except (RelaxError, EngineFault, EngineRetry):
        raise
    except Exception as error:
        return BadAnswer("episode_exception", describe_error(error), locate_error(error))


async def play(
    task: Task,
    request: GenerateRequest,
    ask_engine: Callable[[GenerateRequest], Awaitable[Answer]],
    limit_s: float = math.inf,
) -> Answer | Episode:
    """One attempt at the prompt of ``request``. ``ask_engine`` gets one response from the engine.

    ``limit_s``: time limit of an episode that the task plays, without the time of responses.

    A task that defines `episode` gets requests without a draft, because an unfinished turn is not
    an episode. An exception of the task costs the prompt group. EngineRetry: as ``ask_engine``.
    """
    if not task.makes("episode"):
        return await ask_engine(request)

    timer = EpisodeTimer(limit_s)

    async def ask(request: GenerateRequest) -> Generation:
        with timer.paused():
            answer = await ask_engine(dataclasses.replace(request, draft=None))
        if isinstance(answer, BadAnswer):
            raise answer
        return answer

    playing = task.episode(dataclasses.replace(request, draft=None), ask)
    episode = await run_with_timer(playing, timer, limit_s)
    if request.draft and not isinstance(episode, BadAnswer):
        request.draft.ended = episode
    return episode


def check_episode(episode: Generation | Episode) -> None:
    """BadAnswer: ``episode`` has an invalid row, or no sampled token."""
    rows = [row.generation for row in episode.rows] if isinstance(episode, Episode) else [episode]
    if not 0 < len(rows) <= MAX_ROWS:
        raise BadAnswer(
            "wrong_count", f"found an episode of {len(rows)} rows, allowed 1 to {MAX_ROWS}"
        )
    masks = [np.asarray(checked(row, sys.maxsize).token_versions) != NO_VERSION for row in rows]
    for row, is_sampled in zip(rows, masks, strict=True):
        if np.any(np.asarray(row.logprobs)[~is_sampled]):
            raise BadAnswer(
                "wrong_count",
                "found a log-probability other than 0 of a token that was not sampled",
            )
    if not any(is_sampled.any() for is_sampled in masks):
        raise BadAnswer("wrong_count", "found no token that the policy has sampled")
