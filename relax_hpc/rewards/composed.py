"""Rewards made of others: a weighted sum, and a choice by the prompt's line.

Each part is computed where it would be alone, all parts at a time; one that fails fails the prompt
group, and never counts as 0."""

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
    """Sum of rewards times their weights; `components` has each by its name, and theirs as
    `name.theirs`."""

    def __init__(self, parts: Mapping[str, tuple[float, Rewards]]) -> None:
        self._parts = parts

    async def start(self) -> None:
        await asyncio.gather(*(part.start() for _, part in self._parts.values()))

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        found = await asyncio.gather(*(part.score(samples) for _, part in self._parts.values()))
        for name, scores in zip(self._parts, found, strict=True):
            if isinstance(scores, RewardError):
                return RewardError(scores.reason, f"{name}: {scores.detail}", scores.origin)
        return checked([self._sum(each) for each in zip(*found, strict=True)], len(samples))

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for _, part in self._parts.values()))

    def _sum(self, scores: Sequence[Score]) -> dict[str, float]:
        """Weighted sum of one sample's ``scores`` by the parts, which are its components."""
        weights = [weight for weight, _ in self._parts.values()]
        values = {
            TOTAL: _exact_sum(
                [weight * score.total for weight, score in zip(weights, scores, strict=True)]
            )
        }
        for name, score in zip(self._parts, scores, strict=True):
            values[name] = score.total
            values |= {f"{name}.{inner}": value for inner, value in score.components.items()}
        return values


class ByRow:
    """The reward that the prompt's line names, one for the whole prompt group."""

    def __init__(self, column: str, parts: Mapping[str, Rewards]) -> None:
        self._column, self._parts = column, parts

    async def start(self) -> None:
        await asyncio.gather(*(part.start() for part in self._parts.values()))

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        value = samples[0].metadata.get(self._column)
        if part := self._parts.get(value) if isinstance(value, str) else None:
            return await part.score(samples)
        found = "nothing" if value is None else repr(value)[:100]
        return RewardError(
            "reward_exception", f"{self._column}: found {found}, allowed: {', '.join(self._parts)}"
        )

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self._parts.values()))


def _exact_sum(terms: Sequence[float]) -> float:
    """Sum of ``terms``, rounded once, so that their order does not matter; infinity if it is not
    finite."""
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return math.inf


def parts_of(
    name: str, settings: RewardSettings, inside: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Parts of the reward called ``name``: configuration key and name of each that is not composed,
    or key and empty where there is nothing, or where it would be a part of itself."""
    if name in inside:
        yield f"reward.{name}", ""
        return
    if name == WEIGHTED:
        parts = {f"reward.weighted.{part}": part for part in settings.weighted}
    elif name == BY_ROW:
        parts = {
            f"reward.by_row.rewards.{value}": part
            for value, part in settings.by_row.rewards.items()
        }
    else:
        yield "", name
        return
    if not parts:
        yield f"reward.{name}", ""
    for key, part in parts.items():
        yield from (
            (inner or key, leaf) for inner, leaf in parts_of(part, settings, (*inside, name))
        )
