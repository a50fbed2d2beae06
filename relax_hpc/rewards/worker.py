"""`python -m relax_hpc.rewards.worker`: a process in which rewards of one's own are computed, see `pool`.

A plain function is called in the main thread, one prompt group after the other, with no event loop around it. Of
`async def` any number are under way. What is printed goes to the role's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from relax_hpc.errors import ConfigError
from relax_hpc.rendezvous.process import die_with_parent
from relax_hpc.reward_settings import RewardSettings, rebuilt
from relax_hpc.rewards import Reward, RewardError, RewardInput, Scores, frames, get_reward
from relax_hpc.rewards.ask import is_async, scores, scores_soon

AT_ONCE = 64
"""Prompt groups that a worker has at a time, of a reward that is `async def`, unless its `at_once` says another."""
_OOM_SCORE = 500
"""OOM score by which this process ends where memory runs out, and not the role, or an engine."""


def main() -> None:
    """Answer the messages of standard input on standard output until there are no more."""
    die_with_parent()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Neither what a user's code prints nor what it reads is a message.
    os.dup2(2, 1)
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        _serve(asked, answers)


def _serve(asked: BinaryIO, answers: BinaryIO) -> None:
    first = frames.read(asked)
    try:
        reward = get_reward(first["reward"], rebuilt(RewardSettings, first["settings"]))
    except ConfigError as error:
        _write(answers, {"error": str(error)})
        return
    many = is_async(reward)
    _write(answers, {"at_once": getattr(reward, "at_once", AT_ONCE) if many else 0})
    if many:
        asyncio.run(_serve_many(reward, first["limit_s"], asked, answers))
    while not many:
        message = frames.read(asked)
        _write(answers, _answer(message, scores(reward, _samples(message))))


async def _serve_many(reward: Reward, limit_s: float, asked: BinaryIO, answers: BinaryIO) -> None:
    reader = asyncio.StreamReader(limit=frames.MOST_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), asked)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(message: dict[str, Any]) -> None:
        found: Scores
        try:
            async with asyncio.timeout(limit_s):
                found = await scores_soon(reward, _samples(message))
        except TimeoutError:
            found = RewardError("reward_timeout", "")
        _write(answers, _answer(message, found))

    while True:
        try:
            head = await reader.readexactly(frames.HEAD.size)
            message = json.loads(await reader.readexactly(frames.size(head)))
        except asyncio.IncompleteReadError:
            raise EOFError from None
        task = asyncio.create_task(answer(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _samples(message: dict[str, Any]) -> list[RewardInput]:
    return [RewardInput(*fields) for fields in message["samples"]]


def _answer(message: dict[str, Any], found: Scores) -> dict[str, Any]:
    if isinstance(found, RewardError):
        return {"id": message["id"], "error": [found.reason, found.detail]}
    return {"id": message["id"], "scores": [[score.total, score.components] for score in found]}


def _write(file: BinaryIO, message: Any) -> None:
    file.write(frames.pack(message))
    file.flush()


def _end(code: int) -> NoReturn:
    """End at once: threads of a user's libraries must not keep this process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # a user's function may raise what no `except Exception` catches
        traceback.print_exc()
        # While the pipe is open: the role kills who has closed it, and would say that it was killed.
        _end(1)
    _end(0)
