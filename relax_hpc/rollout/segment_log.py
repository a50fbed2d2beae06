"""The logs of attempts: what engines make is appended beside their work, and read by whoever goes
on after a death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from relax_hpc.base.errors import RelaxError
from relax_hpc.config.schema import RolloutConfig
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.client.answers import AttemptLog
from relax_hpc.queue.client.segments import append_segments, read_log
from relax_hpc.queue.storage.shard import ShardError
from relax_hpc.rollout.attempt import Attempt, Made, answer_of

_LAST_S = 3.0
"""Seconds for the queue to take unfinished attempts when the role is asked to stop."""
_HANDED_ON_S = 60.0
"""Seconds for the queue to take attempts that others are to go on with; past it, they draw them
anew."""
_SPARE_S = 10.0
"""Seconds for the queue to take spare attempts, which are no loss."""


class SegmentLog:
    """Appends to the logs of some attempts, now and then and when the role is asked to stop, and
    reads them."""

    def __init__(self, client: QueueClient, shape: RolloutConfig) -> None:
        self._client, self._shape = client, shape
        self._attempts: dict[int, Attempt] = {}
        """Attempts under way, by ticket."""
        self._busy = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Append now and then while the body runs, and once more if it does not come to its end."""
        saver = asyncio.create_task(self._now_and_then())
        try:
            yield
        except BaseException:
            await self._append_all(_LAST_S)
            raise
        finally:
            saver.cancel()
            await asyncio.wait([saver])

    @asynccontextmanager
    async def of(self, attempt: Attempt) -> AsyncIterator[None]:
        """Append to its log while the body goes on, and once it has ended no more: nothing is on
        its way then."""
        self._attempts[attempt.ticket] = attempt
        yield
        # After a failure or a cancellation it stays: see `running`.
        await self._forget(attempt)

    async def _forget(self, attempt: Attempt) -> None:
        async with self._busy:
            del self._attempts[attempt.ticket]

    async def keep(self, attempt: Attempt) -> None:
        """Append what its log does not have, and nothing any more: nobody goes on with it here."""
        if self._shape.save_partial != "off":
            async with self._busy:
                await asyncio.to_thread(self._append, [attempt], False, _HANDED_ON_S)
        await self._forget(attempt)

    async def spare(self, attempt: Attempt) -> None:
        """Have the queue keep a whole attempt for another ticket."""
        await asyncio.to_thread(self._append, [attempt], True, _SPARE_S)

    async def read(self, place: AttemptLog, prompt: Prompt) -> dict[int, Made]:
        """Answers that a log has, by episode; empty if it cannot be used."""
        try:
            episodes = await asyncio.to_thread(read_log, self._client, place)
        except (ShardError, KeyError) as error:
            print(f"ticket {place.holder} is generated anew: {error}", flush=True)
            return {}
        found = {
            k: made for k, rows in episodes.items() if (made := answer_of(rows, prompt)) is not None
        }
        if len(found) < len(episodes):
            print(
                f"ticket {place.holder} is generated anew: its prompt {prompt.prompt_id} has "
                "changed",
                flush=True,
            )
        return found if len(found) == len(episodes) else {}

    async def _now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._shape.save_partial_every_s)
            # Not to be cut short: what the queue has taken must be known here.
            await asyncio.shield(asyncio.create_task(self._append_all()))

    async def _append_all(self, timeout: float | None = None) -> None:
        if self._shape.save_partial != "off":
            async with self._busy:
                await asyncio.to_thread(self._append, list(self._attempts.values()), False, timeout)

    def _append(self, attempts: Iterable[Attempt], spare: bool, timeout: float | None) -> None:
        """Append what the queue does not have; if it cannot be, no more is lost than with the
        process."""
        unfinished_too, budget = self._shape.save_partial == "tokens", self._shape.max_new_tokens
        news = {one: segments for one in attempts if (segments := one.news(unfinished_too, budget))}
        segments = [segment for some in news.values() for segment in some]
        if not segments:
            return
        numbers = {attempt.ticket: attempt.number for attempt in news}
        try:
            refused = append_segments(self._client, segments, numbers, spare, timeout)
        except (RelaxError, OSError) as error:
            print(
                f"{len(segments)} segments of unfinished prompt groups were not appended: {error}",
                flush=True,
            )
            return
        for attempt, some in news.items():
            attempt.appended(some, attempt.ticket in refused)
