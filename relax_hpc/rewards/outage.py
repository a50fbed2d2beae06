"""Rewards that are computed by a group of the run. While the group restarts, requests wait, and
their time limit does not run."""

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

_CHECK_S = 1.0
"""Seconds between two searches for a server."""


class OutageRetry:
    """Retries ``rewards`` when a server is available again. If a prompt group has waited ``away_s``
    in total, it fails with the reason `reward_away`."""

    def __init__(
        self, rewards: Rewards, folder: Path, away_s: float, waits: Callable[[int], None]
    ) -> None:
        """``folder``: contains the endpoints. ``waits`` is called with 1 when a prompt group begins
        to wait, and with -1 when it stops."""
        self._rewards, self._folder, self._away_s, self._waits = rewards, folder, away_s, waits
        self._search = asyncio.Lock()

    async def start(self) -> None:
        """See `Rewards`. No server need be available yet."""
        await self._rewards.start()

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        """See `Rewards`."""
        left_s = self._away_s
        while True:
            scores = await self._rewards.score(samples)
            if not (isinstance(scores, RewardError) and scores.reason == Away.reason):
                return scores
            left_s -= await self._wait(left_s)
            if left_s <= 0:
                detail = f"away for {self._away_s:g} s, reward.judge.away_s: {scores.detail}"
                return RewardError(Away.reason, detail)

    async def close(self) -> None:
        """See `Rewards`."""
        await self._rewards.close()

    async def _wait(self, max_s: float) -> float:
        """Wait up to ``max_s`` until a server is available. Returns the seconds, at least
        _CHECK_S."""
        start_s = time.monotonic()
        self._waits(1)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max_s):
                    # First a pause: the endpoint of a server that has just died is still there.
                    await asyncio.sleep(min(max_s, _CHECK_S))
                    async with self._search:
                        while not await _is_available(read_endpoints(self._folder)):
                            await asyncio.sleep(_CHECK_S)
        finally:
            self._waits(-1)
        return max(_CHECK_S, time.monotonic() - start_s)


async def _is_available(endpoints: Sequence[Endpoint]) -> bool:
    """Whether a server at one of ``endpoints`` proves that it has the key of the endpoint."""
    for endpoint in endpoints:
        with contextlib.suppress(OSError):
            (await open_endpoint(endpoint)).close()
            return True
    return False
