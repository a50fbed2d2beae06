"""Rewards of servers that a group of the run starts, and starts again: while they are away their
clock stands."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.net.rendezvous.endpoints import Endpoint, read_endpoints
from relax_hpc.rewards import RewardError, RewardInput, Scores
from relax_hpc.rewards.group_service import open_endpoint
from relax_hpc.rewards.service import Away

if TYPE_CHECKING:
    from relax_hpc.rewards.placement import Rewards

_LOOK_S = 1.0
"""Seconds between two looks for a server."""


class WhileAway:
    """``rewards`` that are asked for again once a server is there, for ``away_s`` in all; then they
    fail as `reward_away`."""

    def __init__(
        self, rewards: Rewards, folder: Path, away_s: float, waits: Callable[[int], None]
    ) -> None:
        """``folder``: of the endpoints. ``waits`` is told of each prompt group that begins (1) or
        ends (-1) to wait."""
        self._rewards, self._folder, self._away_s, self._waits = rewards, folder, away_s, waits
        self._looking = asyncio.Lock()

    async def start(self) -> None:
        """See `Rewards`; no server need be there yet."""
        await self._rewards.start()

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        """See `Rewards`."""
        left_s = self._away_s
        while True:
            found = await self._rewards.score(samples)
            if not (isinstance(found, RewardError) and found.reason == Away.reason):
                return found
            left_s -= await self._wait(left_s)
            if left_s <= 0:
                return RewardError(
                    Away.reason, f"away for {self._away_s:g} s, reward.judge.away_s: {found.detail}"
                )

    async def close(self) -> None:
        """See `Rewards`."""
        await self._rewards.close()

    async def _wait(self, most_s: float) -> float:
        """Wait until a server is there, for ``most_s`` at most; the seconds that it took, one at
        least."""
        began = time.monotonic()
        self._waits(1)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    # Of one that has just gone it is not known yet.
                    await asyncio.sleep(min(most_s, _LOOK_S))
                    async with self._looking:
                        while not await _any_proven(read_endpoints(self._folder)):
                            await asyncio.sleep(_LOOK_S)
        finally:
            self._waits(-1)
        return max(_LOOK_S, time.monotonic() - began)


async def _any_proven(endpoints: Sequence[Endpoint]) -> bool:
    """Whether a server answers at one of ``endpoints`` and proves that it has the endpoint's
    key."""
    for endpoint in endpoints:
        with contextlib.suppress(OSError):
            (await open_endpoint(endpoint)).close()
            return True
    return False
