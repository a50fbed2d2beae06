"""Has a task play its episodes with an engine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Awaitable, Callable

import numpy as np

from relax_hpc.engines.engine import BadAnswer, EngineFault, Episode, GenerateRequest, Generation, checked
from relax_hpc.errors import RelaxError
from relax_hpc.tasks import Task
from relax_hpc.transfer_queue.row_ids import MAX_ROWS
from relax_hpc.transfer_queue.row_schema import NOBODY

Answer = Generation | BadAnswer


class Repeat(Exception):
    """An engine failed to answer, which is counted; it is to be asked again."""


async def play(
    task: Task, request: GenerateRequest, once: Callable[[GenerateRequest], Awaitable[Answer]]
) -> Answer | Episode:
    """One attempt at the prompt of ``request``; ``once`` asks the engine for one response.

    A task that has its own way to play gets requests without a draft: what there is of a turn is no episode. What it
    raises costs the prompt group. Repeat: as ``once``.
    """
    if not task.makes("episode"):
        return await once(request)

    async def ask(asked: GenerateRequest) -> Generation:
        answer = await once(dataclasses.replace(asked, draft=None))
        if isinstance(answer, BadAnswer):
            raise answer
        return answer

    try:
        made = _sound(await task.episode(dataclasses.replace(request, draft=None), ask))
    except BadAnswer as bad:
        return bad
    except (RelaxError, EngineFault, Repeat):
        raise
    except Exception as error:  # a user's method may raise anything
        return BadAnswer("episode_exception", f"{type(error).__name__}: {error}")
    if request.draft:
        request.draft.ended = made
    return made


def _sound(made: Generation | Episode) -> Generation | Episode:
    """``made`` itself. BadAnswer: its rows are none, or nobody sampled any of it."""
    rows = [row.made for row in made.rows] if isinstance(made, Episode) else [made]
    if not 0 < len(rows) <= MAX_ROWS:
        raise BadAnswer("wrong_count", f"found an episode of {len(rows)} rows, allowed 1 to {MAX_ROWS}")
    sampled = [np.asarray(checked(row, sys.maxsize).token_versions) != NOBODY for row in rows]
    for row, mine in zip(rows, sampled, strict=True):
        if np.any(np.asarray(row.logprobs)[~mine]):
            raise BadAnswer("wrong_count", "found a log-probability other than 0 of a token that nobody sampled")
    if not any(mine.any() for mine in sampled):
        raise BadAnswer("wrong_count", "found no token that the policy has sampled")
    return made
