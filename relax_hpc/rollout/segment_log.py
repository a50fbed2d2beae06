"""The logs of attempts: responses are appended while engines work. After a death, the next owner of
a ticket reads its log and continues the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import chain

from relax_hpc.base.errors import RelaxError
from relax_hpc.config.schema import RolloutConfig
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.client.answers import AttemptLog
from relax_hpc.queue.client.segments import append_segments, read_log
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.shard import ShardError
from relax_hpc.rollout.attempt import Attempt, EpisodeResult, read_logged_episode

_STOP_TIMEOUT_S = 3.0
"""Seconds to append unfinished attempts when the role is asked to stop."""
_HANDOVER_TIMEOUT_S = 60.0
"""Seconds to append an attempt that another engine will continue. If that fails, it is generated
again."""
_SPARE_TIMEOUT_S = 10.0
"""Seconds to append a spare attempt, whose loss does not matter."""


class SegmentLog:
    """Appends to the logs of running attempts, periodically and when the role is asked to stop, and
    reads logs."""

    def __init__(self, client: QueueClient, settings: RolloutConfig) -> None:
        self._client, self._settings = client, settings
        self._attempts: dict[int, Attempt] = {}
        """Running attempts by ticket."""
        self._appending = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Append periodically while the body runs, and once more if the body raises."""
        saver = asyncio.create_task(self._append_periodically())
        try:
            yield
        except BaseException:
            await self._append_all(_STOP_TIMEOUT_S)
            raise
        finally:
            saver.cancel()
            await asyncio.wait([saver])

    @asynccontextmanager
    async def recording(self, attempt: Attempt) -> AsyncIterator[None]:
        """Append the segments of ``attempt`` while the body runs. After the end, no append is
        running."""
        self._attempts[attempt.ticket] = attempt
        yield
        # Not after a failure or a cancellation: `running` appends the attempt once more then.
        await self._remove(attempt)

    async def _remove(self, attempt: Attempt) -> None:
        async with self._appending:
            del self._attempts[attempt.ticket]

    async def hand_over(self, attempt: Attempt) -> None:
        """Append the segments of an ``attempt`` that another engine will continue, and stop its
        recording."""
        if self._settings.save_partial != "off":
            async with self._appending:
                await asyncio.to_thread(self._append, [attempt], False, _HANDOVER_TIMEOUT_S)
        await self._remove(attempt)

    async def store_spare(self, attempt: Attempt) -> None:
        """Store a whole attempt in the queue for another ticket."""
        await asyncio.to_thread(self._append, [attempt], True, _SPARE_TIMEOUT_S)

    async def read(self, log: AttemptLog, prompt: Prompt) -> dict[int, EpisodeResult]:
        """Results in a log by episode; empty if the log cannot be used."""
        try:
            episodes = await asyncio.to_thread(read_log, self._client, log)
        except (ShardError, KeyError) as error:
            print(f"ticket {log.holder} is generated again: {error}", flush=True)
            return {}
        results = {}
        for k, rows in episodes.items():
            result = read_logged_episode(rows, prompt)
            if result is not None:
                results[k] = result
        if len(results) == len(episodes):
            return results
        print(
            f"ticket {log.holder} is generated again: its prompt {prompt.prompt_id} has changed",
            flush=True,
        )
        return {}

    async def _append_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._settings.save_partial_every_s)
            # Shielded: a cancelled append would not record which segments the queue has accepted.
            await asyncio.shield(asyncio.create_task(self._append_all()))

    async def _append_all(self, timeout: float | None = None) -> None:
        if self._settings.save_partial != "off":
            async with self._appending:
                await asyncio.to_thread(self._append, list(self._attempts.values()), False, timeout)

    def _append(self, attempts: Iterable[Attempt], spare: bool, timeout: float | None) -> None:
        """Append the segments that the queue does not have. If that fails, they are lost only if
        this process dies."""
        unfinished_too = self._settings.save_partial == "tokens"
        new: dict[Attempt, list[Row]] = {}
        for attempt in attempts:
            segments = attempt.new_segments(unfinished_too, self._settings.max_new_tokens)
            if segments:
                new[attempt] = segments
        if not new:
            return
        all_segments = list(chain.from_iterable(new.values()))
        numbers = {attempt.ticket: attempt.number for attempt in new}
        try:
            refused = append_segments(self._client, all_segments, numbers, spare, timeout)
        except (RelaxError, OSError) as error:
            print(
                f"{len(all_segments)} segments of unfinished prompt groups were not appended: "
                f"{error}",
                flush=True,
            )
            return
        for attempt, segments in new.items():
            attempt.note_appended(segments, attempt.ticket in refused)
