"""What is done within a few milliseconds goes to the queue in one put, and each hears of its own
rows alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from relax_hpc.base.errors import FencedError, RefusedError
from relax_hpc.base.versions import Version
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.outbox import Outbox
from tests.helpers.queue_helpers import rows_of

VERSION = Version(1, 0)


class Queue:
    """Takes rows as a client does: waits for `open`, refuses ticket 2, and is told of a bad row of
    ticket 13."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.said: list[object] = []
        self.open, self.asked = threading.Event(), threading.Event()
        self.open.set()

    def generated(self, rows: Sequence[Row]) -> dict[int, str]:
        self.asked.set()
        assert self.open.wait(20.0)
        tickets = sorted({row["ticket"] for row in rows})
        if 13 in tickets:
            raise RefusedError("put: reward: found nan")
        if 99 in tickets:
            raise FencedError("over")
        self.puts.append(tickets)
        self.said.append(tickets)
        return {2: "duplicate"} if 2 in tickets else {}

    async def put(self, rows: Sequence[Row]) -> dict[int, str]:
        return await asyncio.to_thread(self.generated, rows)

    def report(self, step: int, values: dict[str, float]) -> None:
        self.said.append((step, values))


def test_groups_that_are_done_together_are_one_put_and_those_that_come_meanwhile_the_next() -> None:
    queue = Queue()

    async def work() -> list[dict[int, str]]:
        outbox = Outbox(queue.put, queue.report)
        queue.open.clear()
        first = [asyncio.create_task(outbox.put(rows_of([ticket], VERSION))) for ticket in range(4)]
        outbox.report(0, {"reward/generated": 4.0})
        outbox.report(1, {"reward/generated": 2.0})
        assert await asyncio.to_thread(queue.asked.wait, 20.0)
        later = [asyncio.create_task(outbox.put(rows_of([ticket], VERSION))) for ticket in (5, 6)]
        await asyncio.sleep(0)
        queue.open.set()
        return await asyncio.gather(*first, *later)

    assert asyncio.run(work()) == [{}, {}, {2: "duplicate"}, {}, {}, {}]
    assert queue.said == [(1, {"reward/generated": 6.0}), [0, 1, 2, 3], [5, 6]], (
        "counts come before their rows"
    )


def test_a_bad_row_is_refused_with_its_own_group_alone() -> None:
    queue = Queue()

    async def work() -> list[object]:
        outbox = Outbox(queue.put, queue.report)
        puts = [outbox.put(rows_of([ticket], VERSION)) for ticket in (1, 13, 3)]
        return await asyncio.gather(*puts, return_exceptions=True)

    good, bad, other = asyncio.run(work())
    assert (good, other) == ({}, {}) and isinstance(bad, RefusedError) and queue.puts == [[1], [3]]


def test_whoever_waits_hears_that_the_queue_is_gone_and_what_is_left_is_sent_at_the_end() -> None:
    queue = Queue()

    async def work() -> None:
        outbox = Outbox(queue.put, queue.report)
        with pytest.raises(FencedError):
            await outbox.put(rows_of([99], VERSION))
        left = asyncio.create_task(outbox.put(rows_of([4], VERSION)))
        await asyncio.sleep(0)
        left.cancel()
        await outbox.close()

    asyncio.run(work())
    assert queue.puts == [[4]]
