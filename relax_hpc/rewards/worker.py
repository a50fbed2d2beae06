"""`python -m relax_hpc.rewards.worker`: a process in which rewards of one's own are computed, see
`pool`.

A plain function is called in the main thread, one prompt group after the other, with no event loop
around it. Of `async def` any number are under way. What is printed goes to the role's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from relax_hpc.base.error_origin import format_stack
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.reward_settings import RewardSettings, rebuild_settings
from relax_hpc.net.workers import frames
from relax_hpc.net.workers.serving import read_requests, serve, write_answer
from relax_hpc.rewards import Reward, RewardError, RewardInput, Scores, get_reward
from relax_hpc.rewards.scoring import is_async, scores, scores_soon

AT_ONCE = 64
"""Prompt groups that a worker has at a time, of a reward that is `async def`, unless its `at_once`
says another."""


def _serve(asked: BinaryIO, answers: BinaryIO) -> None:
    first = frames.read(asked)
    try:
        reward = get_reward(first["reward"], rebuild_settings(RewardSettings, first["settings"]))
    except ConfigError as error:
        write_answer(answers, {"error": str(error)})
        return
    many = is_async(reward)
    write_answer(answers, {"at_once": getattr(reward, "at_once", AT_ONCE) if many else 0})
    if many:
        asyncio.run(_serve_many(reward, first["limit_s"], asked, answers))
    while not many:
        message = frames.read(asked)
        with _watch_limit(message, first["limit_s"], answers) as answer:
            answer(scores(reward, _samples(message)))


@contextlib.contextmanager
def _watch_limit(
    message: dict[str, Any], limit_s: float, answers: BinaryIO
) -> Iterator[Callable[[Scores], None]]:
    """Answer one request, in any case when its limit is over: then with the stack of the call that
    takes too long, from another thread. Only the first answer is written.

    A call into C that keeps the interpreter's lock stops that thread, too. The parent ends such a
    worker.
    """
    caller, lock, answered = threading.get_ident(), threading.Lock(), threading.Event()

    def answer(result: Scores) -> None:
        with lock:
            if not answered.is_set():
                answered.set()
                write_answer(answers, _answer(message, result))

    def report_late() -> None:
        stack = traceback.extract_stack(sys._current_frames()[caller])
        answer(RewardError("reward_timeout", "", format_stack(stack)))

    timer = threading.Timer(limit_s, report_late)
    timer.daemon = True
    timer.start()
    try:
        yield answer
    finally:
        timer.cancel()


async def _serve_many(reward: Reward, limit_s: float, asked: BinaryIO, answers: BinaryIO) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def answer(message: dict[str, Any]) -> None:
        found: Scores
        try:
            async with asyncio.timeout(limit_s):
                found = await scores_soon(reward, _samples(message))
        except TimeoutError:
            found = RewardError("reward_timeout", "")
        write_answer(answers, _answer(message, found))

    async for message in read_requests(asked):
        task = asyncio.create_task(answer(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _samples(message: dict[str, Any]) -> list[RewardInput]:
    return [RewardInput(*fields) for fields in message["samples"]]


def _answer(message: dict[str, Any], found: Scores) -> dict[str, Any]:
    if isinstance(found, RewardError):
        origin = found.origin
        error = [found.reason, found.detail, origin.location, origin.traceback]
        return {"id": message["id"], "error": error}
    return {"id": message["id"], "scores": [[score.total, score.components] for score in found]}


if __name__ == "__main__":
    serve(_serve)
