"""Has a task play its episodes with an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from relax_hpc.engines.engine import BadAnswer, EngineFault, GenerateRequest, Generation
from relax_hpc.errors import RelaxError
from relax_hpc.tasks import Task

Answer = Generation | BadAnswer


class Repeat(Exception):
    """An engine failed to answer, which is counted; it is to be asked again."""


async def play(task: Task, request: GenerateRequest, once: Callable[[GenerateRequest], Awaitable[Answer]]) -> Answer:
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
        made = await task.episode(dataclasses.replace(request, draft=None), ask)
    except BadAnswer as bad:
        return bad
    except (RelaxError, EngineFault, Repeat):
        raise
    except Exception as error:  # a user's method may raise anything
        return BadAnswer("episode_exception", f"{type(error).__name__}: {error}")
    if request.draft:
        request.draft.ended = made
    return made
