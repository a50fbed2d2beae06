"""Processes in which rewards are computed: this one for those that are quick, workers for others
and for one's own, or a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from relax_hpc.base.reward_settings import RewardSettings
from relax_hpc.rewards import REWARDS, Reward, RewardError, RewardInput, Scores, get_reward
from relax_hpc.rewards.composed import BY_ROW, WEIGHTED, ByRow, Weighted
from relax_hpc.rewards.outage import WhileAway
from relax_hpc.rewards.pool import RewardPool
from relax_hpc.rewards.scoring import scores


class Rewards(Protocol):
    """Scores of prompt groups, any number at a time."""

    async def start(self) -> None:
        """Return when scores can be asked for. ConfigError: there is no such reward."""

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        """The scores of all samples of a prompt, or why there are none."""

    async def close(self) -> None:
        """End all that was started for it."""


class AtOnce:
    """Rewards that are built in, computed at once: they take less than any way to another
    thread."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    async def start(self) -> None: ...

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        return scores(self._reward, samples)

    async def close(self) -> None: ...


class InThread:
    """Rewards in a thread for each prompt group. One that takes longer than ``limit_s`` goes on
    there, with nobody waiting for it."""

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


ALONE = ("remote", "judge")
"""Rewards of which one worker has as many under way as it may: with more the limit would not be
one."""


def make_rewards(
    name: str,
    workers: int,
    limit_s: float,
    settings: RewardSettings | None = None,
    waits: Callable[[int], None] = lambda _: None,
) -> Rewards:
    """Make the rewards that ``name`` gives, as `get_reward`, each part of a composed one by itself;
    one's own in up to ``workers`` processes, or, with 0, in this one. ``waits``: see `WhileAway`.

    ConfigError: there is none that is built in, or that could be imported here.
    """
    settings = settings or RewardSettings()

    def made(part: str) -> Rewards:
        return make_rewards(part, workers, limit_s, settings, waits)

    if name == WEIGHTED:
        return Weighted({part: (weight, made(part)) for part, weight in settings.weighted.items()})
    if name == BY_ROW:
        by_row = settings.by_row
        return ByRow(by_row.column, {value: made(part) for value, part in by_row.rewards.items()})
    if callable(known := REWARDS.get(name)):
        return AtOnce(known)
    if known or (":" in name and workers):
        pool = RewardPool(name, 1 if name in ALONE else max(1, workers), limit_s, settings)
        judge = settings.judge
        served = name == "judge" and judge.endpoints
        return WhileAway(pool, Path(judge.endpoints), judge.away_s, waits) if served else pool
    return InThread(get_reward(name), limit_s)
