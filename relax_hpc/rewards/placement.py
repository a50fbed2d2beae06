"""Choice of the process for a reward. Quick built-in rewards run in this process; others, and those
of users, run in worker processes, or in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from relax_hpc.base.reward_settings import RewardSettings
from relax_hpc.rewards import REWARDS, Reward, RewardError, RewardInput, Scores, get_reward
from relax_hpc.rewards.composed import BY_ROW, WEIGHTED, ByRow, Weighted
from relax_hpc.rewards.outage import OutageRetry
from relax_hpc.rewards.pool import RewardPool
from relax_hpc.rewards.scoring import scores


class Rewards(Protocol):
    """Computes scores of any number of prompt groups concurrently."""

    async def start(self) -> None:
        """Return when `score` can be called. ConfigError: the reward does not exist."""

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        """The scores of all samples of a prompt, or an error."""

    async def close(self) -> None:
        """End all processes and connections of the reward."""


class InProcess:
    """Built-in rewards, computed in this thread: they take less time than a switch to another
    thread."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    async def start(self) -> None: ...

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        return scores(self._reward, samples)

    async def close(self) -> None: ...


class InThread:
    """Rewards in a new thread for each prompt group. After ``limit_s`` the prompt group fails; the
    thread cannot be stopped, and its result is discarded."""

    def __init__(self, reward: Reward, limit_s: float) -> None:
        self._reward, self._limit_s = reward, limit_s

    async def start(self) -> None: ...

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        thread = ThreadPoolExecutor(1)
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.get_running_loop().run_in_executor(
                    thread, scores, self._reward, samples
                )
        except TimeoutError:
            detail = f"the rewards took longer than rollout.reward_timeout_s={self._limit_s:g}"
            return RewardError("reward_timeout", detail)
        finally:
            thread.shutdown(wait=False)

    async def close(self) -> None: ...


ONE_WORKER = ("remote", "judge")
"""Rewards with only one worker. It limits the number of open requests, which several workers would
exceed together."""


def make_rewards(
    name: str,
    workers: int,
    limit_s: float,
    settings: RewardSettings | None = None,
    waits: Callable[[int], None] = lambda _: None,
) -> Rewards:
    """Make the reward called ``name``, see `get_reward`; of a composed reward, each inner reward is
    placed separately. A user's reward runs in up to ``workers`` processes; with 0 in threads of
    this process. ``waits``: see `OutageRetry`.

    ConfigError: the reward is not built in, and cannot be imported here.
    """
    settings = settings or RewardSettings()

    def make_inner(inner: str) -> Rewards:
        return make_rewards(inner, workers, limit_s, settings, waits)

    if name == WEIGHTED:
        weighted = settings.weighted.items()
        return Weighted({inner: (weight, make_inner(inner)) for inner, weight in weighted})
    if name == BY_ROW:
        by_row = settings.by_row
        rewards = {value: make_inner(inner) for value, inner in by_row.rewards.items()}
        return ByRow(by_row.column, rewards)
    builtin = REWARDS.get(name)
    if callable(builtin):
        return InProcess(builtin)
    if not builtin and not (":" in name and workers):
        return InThread(get_reward(name), limit_s)
    pool = RewardPool(name, 1 if name in ONE_WORKER else max(1, workers), limit_s, settings)
    judge = settings.judge
    if name == "judge" and judge.endpoints:
        return OutageRetry(pool, Path(judge.endpoints), judge.away_s, waits)
    return pool
