"""Finished prompt groups on their way to the queue. Groups that finish within a few milliseconds
share one put.

A put costs almost the same for one group as for hundreds: a shard and its file, a request, a record
of the journal, and the same again in each role that reads it. So each group is handed over as soon
as it is finished, and groups are collected here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from relax_hpc.base.errors import RefusedError
from relax_hpc.queue.row_schema import Row

Put = Callable[[list[Row]], Awaitable[dict[int, str]]]
GATHER_S = 0.003
"""Seconds for which the first of several groups waits for the others."""
_MAX_TOKENS = 1 << 22
"""Most tokens of one put, unless a single item has more. They are some 100 MB of rows, which are
copied in well under a second."""
_CLOSE_TIMEOUT_S = 3.0
"""Seconds for the last put when the role ends."""


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Rows of whole prompt groups, and the future of their caller."""

    rows: Sequence[Row]
    refused: asyncio.Future[dict[int, str]]

    @property
    def tokens(self) -> int:
        return sum(len(row["token_ids"]) for row in self.rows)

    @property
    def tickets(self) -> set[int]:
        return {row["ticket"] for row in self.rows}


class Outbox:
    """Puts the rows of several prompt groups together. For one process and one event loop.

    ::

        refused = await outbox.put(rows)
    """

    def __init__(self, put: Put, report: Callable[[int, dict[str, float]], None]) -> None:
        """``put(rows)`` puts prompt groups into the queue; ``report(step, values)`` sends
        metrics."""
        self._put_all, self._report = put, report
        self._parcels: list[_Parcel] = []
        self._values: Counter[str] = Counter()
        self._step = 0
        self._sending: asyncio.Task[None] | None = None

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Send counts, which are added up, with the next put or without one. Does not wait."""
        self._step = max(self._step, step)
        self._values.update(values)
        self._start_sending()

    async def put(self, rows: Sequence[Row]) -> dict[int, str]:
        """Put whole prompt groups into the queue, together with others. Returns why tickets of
        ``rows`` were refused.

        RefusedError as `QueueClient.put`.
        """
        parcel = _Parcel(rows, asyncio.get_running_loop().create_future())
        self._parcels.append(parcel)
        self._start_sending()
        return await parcel.refused

    async def close(self) -> None:
        """Wait a moment for the last put, then stop."""
        if self._sending:
            await asyncio.wait([self._sending], timeout=_CLOSE_TIMEOUT_S)
            self._sending.cancel()

    def _start_sending(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Put one batch after the other. Groups that finish during a put go with the next one."""
        await asyncio.sleep(GATHER_S)
        while self._parcels or self._values:
            if self._values:
                # Before the rows, while their step is not complete.
                values, self._values = self._values, Counter()
                self._report(self._step, dict(values))
            parcels = self._take_batch()
            if parcels:
                await self._put(parcels)

    def _take_batch(self) -> list[_Parcel]:
        count = tokens = 0
        for parcel in self._parcels:
            tokens += parcel.tokens
            if count and tokens > _MAX_TOKENS:
                break
            count += 1
        taken, self._parcels = self._parcels[:count], self._parcels[count:]
        return taken

    async def _put(self, parcels: list[_Parcel]) -> None:
        rows: list[Row] = []
        for parcel in parcels:
            rows += parcel.rows
        try:
            refused = await self._put_all(rows)
        except RefusedError as error:
            if len(parcels) == 1:
                _fail(parcels, error)
                return
            # One malformed row refuses the whole put. Put each parcel separately, so that only the
            # one with that row fails.
            for parcel in parcels:
                await self._put([parcel])
        except Exception as error:
            _fail(parcels, error)
        else:
            for parcel in parcels:
                tickets = parcel.tickets
                _answer(
                    parcel,
                    {ticket: reason for ticket, reason in refused.items() if ticket in tickets},
                )


def _answer(parcel: _Parcel, refused: dict[int, str]) -> None:
    # InvalidStateError: the caller was cancelled.
    with contextlib.suppress(asyncio.InvalidStateError):
        parcel.refused.set_result(refused)


def _fail(parcels: Sequence[_Parcel], error: Exception) -> None:
    for parcel in parcels:
        with contextlib.suppress(asyncio.InvalidStateError):
            parcel.refused.set_exception(error)
