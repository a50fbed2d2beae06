"""Rewards that are composed of others: a weighted sum, and a choice by the prompt's line.

Each inner reward runs in the process in which it would run outside of a composition, and all of
them run concurrently. If one fails, the prompt group fails: a failure never counts as 0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from relax_hpc.rewards import RewardError, RewardInput, Score, Scores
from relax_hpc.rewards.scoring import TOTAL, checked

if TYPE_CHECKING:
    from relax_hpc.base.reward_settings import RewardSettings
    from relax_hpc.rewards.placement import Rewards

WEIGHTED, BY_ROW = "weighted", "by_row"


class Weighted:
    """Sum of rewards times their weights. `components` has the total of each reward under its name,
    and its components under `name.component`."""

    def __init__(self, weighted: Mapping[str, tuple[float, Rewards]]) -> None:
        """``weighted``: weight and reward by name."""
        self._weights = [weight for weight, _ in weighted.values()]
        self._rewards = {name: rewards for name, (_, rewards) in weighted.items()}

    async def start(self) -> None:
        await asyncio.gather(*(rewards.start() for rewards in self._rewards.values()))

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        by_reward = await asyncio.gather(
            *(rewards.score(samples) for rewards in self._rewards.values())
        )
        lists: list[list[Score]] = []
        for name, scores in zip(self._rewards, by_reward, strict=True):
            if isinstance(scores, RewardError):
                return RewardError(scores.reason, f"{name}: {scores.detail}", scores.origin)
            lists.append(scores)
        return checked([self._sum(row) for row in zip(*lists, strict=True)], len(samples))

    async def close(self) -> None:
        await asyncio.gather(*(rewards.close() for rewards in self._rewards.values()))

    def _sum(self, scores: Sequence[Score]) -> dict[str, float]:
        """Weighted sum of one sample's ``scores``, one for each reward, with its components."""
        pairs = zip(self._weights, scores, strict=True)
        values = {TOTAL: _exact_sum([weight * score.total for weight, score in pairs])}
        for name, score in zip(self._rewards, scores, strict=True):
            values[name] = score.total
            values |= {f"{name}.{inner}": value for inner, value in score.components.items()}
        return values


class ByRow:
    """The reward that a column of the prompt's line names, one for the whole prompt group."""

    def __init__(self, column: str, rewards: Mapping[str, Rewards]) -> None:
        """``rewards``: the reward for each value of the column."""
        self._column, self._rewards = column, rewards

    async def start(self) -> None:
        await asyncio.gather(*(rewards.start() for rewards in self._rewards.values()))

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        value = samples[0].metadata.get(self._column)
        if isinstance(value, str) and value in self._rewards:
            return await self._rewards[value].score(samples)
        shown = "nothing" if value is None else repr(value)[:100]
        allowed = ", ".join(self._rewards)
        return RewardError("reward_exception", f"{self._column}: found {shown}, allowed: {allowed}")

    async def close(self) -> None:
        await asyncio.gather(*(rewards.close() for rewards in self._rewards.values()))


def _exact_sum(terms: Sequence[float]) -> float:
    """Sum of ``terms``, rounded once, so that their order has no effect; infinity if the sum is not
    finite."""
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return math.inf


def parts_of(
    name: str, settings: RewardSettings, inside: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Configuration key and name of each reward in the reward ``name`` that is not composed itself.

    The name is empty if a composed reward has no inner reward, or contains itself. ``inside``:
    names of the composed rewards around this one.
    """
    if name in inside:
        yield f"reward.{name}", ""
        return
    if name == WEIGHTED:
        inner_names = {f"reward.weighted.{inner}": inner for inner in settings.weighted}
    elif name == BY_ROW:
        choices = settings.by_row.rewards.items()
        inner_names = {f"reward.by_row.rewards.{value}": inner for value, inner in choices}
    else:
        yield "", name
        return
    if not inner_names:
        yield f"reward.{name}", ""
    for key, inner_name in inner_names.items():
        for inner_key, leaf in parts_of(inner_name, settings, (*inside, name)):
            yield inner_key or key, leaf
