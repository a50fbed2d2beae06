"""Hands what is unfinished to the queue while it is made, so that a death loses little of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from relax_hpc.config.schema import RolloutConfig
from relax_hpc.errors import RelaxError
from relax_hpc.rollout.partial import PartialGroup
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.transfer_queue.client.partials import keep

_LAST_SAVE_S = 3.0
"""For the queue to take what is unfinished when the role is asked to stop."""


class Saving:
    """Has the queue keep what there is of some prompt groups, now and then and when the role is asked to stop."""

    def __init__(self, client: QueueClient, shape: RolloutConfig) -> None:
        self._client, self._shape = client, shape
        self._groups: dict[tuple[int, int], PartialGroup] = {}
        self._busy = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For as long as the body takes; if it does not come to its end, what there is then is saved too."""
        saver = asyncio.create_task(self._now_and_then())
        try:
            yield
        except BaseException:
            async with self._busy:
                await asyncio.to_thread(self._save, list(self._groups.values()), _LAST_SAVE_S)
            raise
        finally:
            saver.cancel()
            await asyncio.wait([saver])

    @asynccontextmanager
    async def of(self, group: PartialGroup) -> AsyncIterator[None]:
        """Save ``group`` while the body goes on, and once it has ended no more: nothing is on its way then."""
        self._groups[group.ticket, group.attempt] = group
        # After a failure or a cancellation it stays: see `running`.
        yield
        async with self._busy:
            del self._groups[group.ticket, group.attempt]

    async def _now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._shape.save_partial_every_s)
            # Not to be cut short: what the queue has taken must be known here.
            await asyncio.shield(asyncio.create_task(self._once()))

    async def _once(self) -> None:
        async with self._busy:
            await asyncio.to_thread(self._save, list(self._groups.values()))

    def _save(self, groups: Sequence[PartialGroup], timeout: float | None = None) -> None:
        """Hand over what the queue does not have; if it cannot, no more is lost than with the process."""
        shape = self._shape
        if shape.save_partial == "off":
            return
        made = [(group, group.news(shape.save_partial == "tokens", shape.max_new_tokens)) for group in groups]
        made = [(group, news) for group, news in made if news]
        rows = [row for group, news in made for row in group.rows(news)]
        if not rows:
            return
        attempts = {group.ticket: group.attempt for group, _ in made}
        reused = {group.ticket: tokens for group, news in made if (tokens := group.reused(news))}
        try:
            refused = keep(self._client, rows, attempts, reused, timeout=timeout)
        except (RelaxError, OSError) as error:
            print(f"{len(rows)} samples of unfinished prompt groups were not saved: {error}", flush=True)
            return
        for group, news in made:
            group.was_kept(news, group.ticket in refused)
