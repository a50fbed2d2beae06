"""`python -m relax_hpc.rewards.worker`: a process that computes rewards, see `pool`.

A plain function is called in the main thread, for one prompt group after the other, without a
running event loop. Calls of an `async def` run concurrently. Output of a reward goes to the log of
the role.
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
"""Concurrent prompt groups of a worker whose reward is `async def`, unless the reward has an
attribute `at_once`."""


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    setup = frames.read(requests)
    try:
        reward = get_reward(setup["reward"], rebuild_settings(RewardSettings, setup["settings"]))
    except ConfigError as error:
        write_answer(answers, {"error": str(error)})
        return
    is_concurrent = is_async(reward)
    at_once = getattr(reward, "at_once", AT_ONCE) if is_concurrent else 0
    write_answer(answers, {"at_once": at_once})
    if is_concurrent:
        asyncio.run(_serve_concurrently(reward, setup["limit_s"], requests, answers))
        return
    while True:
        message = frames.read(requests)
        with _watch_limit(message, setup["limit_s"], answers) as answer:
            answer(scores(reward, _samples(message)))


@contextlib.contextmanager
def _watch_limit(
    message: dict[str, Any], limit_s: float, answers: BinaryIO
) -> Iterator[Callable[[Scores], None]]:
    """Context of one request; yields the function that writes its answer.

    After ``limit_s`` another thread writes an error with the stack of the call that takes too long.
    Only the first answer is written. If a call into C holds the interpreter's lock, this thread
    cannot run either. The parent ends such a worker.
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


async def _serve_concurrently(
    reward: Reward, limit_s: float, requests: BinaryIO, answers: BinaryIO
) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def answer(message: dict[str, Any]) -> None:
        result: Scores
        try:
            async with asyncio.timeout(limit_s):
                result = await scores_soon(reward, _samples(message))
        except TimeoutError:
            result = RewardError("reward_timeout", "")
        write_answer(answers, _answer(message, result))

    async for message in read_requests(requests):
        task = asyncio.create_task(answer(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _samples(message: dict[str, Any]) -> list[RewardInput]:
    return [RewardInput(*fields) for fields in message["samples"]]


def _answer(message: dict[str, Any], result: Scores) -> dict[str, Any]:
    if isinstance(result, RewardError):
        origin = result.origin
        error = [result.reason, result.detail, origin.location, origin.traceback]
        return {"id": message["id"], "error": error}
    return {"id": message["id"], "scores": [[score.total, score.components] for score in result]}


if __name__ == "__main__":
    serve(_serve)
