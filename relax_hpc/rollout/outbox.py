"""Finished prompt groups on their way to the queue: those that are done within a few milliseconds
go in one put.

A put costs much the same for one group as for hundreds: a shard and its file, a request, a record
of the journal, and the same again in each role that reads it. So groups are handed over as soon as
they are done, and gathered here.
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
"""Seconds that the first of several hand-overs waits for the others."""
_MOST_TOKENS = 1 << 22
"""Most tokens of one put, unless a single hand-over has more: some 100 MB of rows, which are copied
in well under a second."""
_LAST_S = 3.0
"""Seconds to put what is left when the role ends."""


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Rows of whole prompt groups, and who waits for what the queue says of them."""

    rows: Sequence[Row]
    refused: asyncio.Future[dict[int, str]]

    @property
    def tokens(self) -> int:
        return sum(len(row["token_ids"]) for row in self.rows)

    @property
    def tickets(self) -> set[int]:
        return {row["ticket"] for row in self.rows}


class Outbox:
    """Outbox of one process, for one event loop: puts rows of several prompt groups together.

    ::

        refused = await outbox.put(rows)
    """

    def __init__(self, put: Put, report: Callable[[int, dict[str, float]], None]) -> None:
        """``put(rows)`` has the queue take prompt groups, ``report(step, values)`` sends
        metrics."""
        self._put_all, self._report = put, report
        self._parcels: list[_Parcel] = []
        self._values: Counter[str] = Counter()
        self._step = 0
        self._sending: asyncio.Task[None] | None = None

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Send counts, which add up, with the next put, or without one if none comes: nobody waits
        for them."""
        self._step = max(self._step, step)
        self._values.update(values)
        self._begin()

    async def put(self, rows: Sequence[Row]) -> dict[int, str]:
        """Have the queue take whole prompt groups, together with others; why tickets of ``rows``
        were refused.

        RefusedError as `QueueClient.put`.
        """
        parcel = _Parcel(rows, asyncio.get_running_loop().create_future())
        self._parcels.append(parcel)
        self._begin()
        return await parcel.refused

    async def close(self) -> None:
        """Have the queue take what was handed over, if it does so soon."""
        if self._sending:
            await asyncio.wait([self._sending], timeout=_LAST_S)
            self._sending.cancel()

    def _begin(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """One put after the other: what is done while one is under way goes with the next."""
        await asyncio.sleep(GATHER_S)
        while self._parcels or self._values:
            if self._values:
                # Before its rows: the step that they are for is not over then.
                values, self._values = self._values, Counter()
                self._report(self._step, dict(values))
            if parcels := self._take():
                await self._put(parcels)

    def _take(self) -> list[_Parcel]:
        count = tokens = 0
        for parcel in self._parcels:
            tokens += parcel.tokens
            if count and tokens > _MOST_TOKENS:
                break
            count += 1
        taken, self._parcels = self._parcels[:count], self._parcels[count:]
        return taken

    async def _put(self, parcels: list[_Parcel]) -> None:
        rows = [row for parcel in parcels for row in parcel.rows]
        try:
            refused = await self._put_all(rows)
        except RefusedError as error:
            if len(parcels) == 1:
                _fail(parcels, error)
                return
            # A row that is not as it should be is the fault of those it came with alone.
            for parcel in parcels:
                await self._put([parcel])
        except Exception as error:
            _fail(parcels, error)
        else:
            for parcel in parcels:
                _answer(
                    parcel,
                    {ticket: why for ticket, why in refused.items() if ticket in parcel.tickets},
                )


def _answer(parcel: _Parcel, refused: dict[int, str]) -> None:
    # Who waited may have been cancelled.
    with contextlib.suppress(asyncio.InvalidStateError):
        parcel.refused.set_result(refused)


def _fail(parcels: Sequence[_Parcel], error: Exception) -> None:
    for parcel in parcels:
        with contextlib.suppress(asyncio.InvalidStateError):
            parcel.refused.set_exception(error)
