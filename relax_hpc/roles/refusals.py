"""Refused HTTP requests of the servers in the hub's group, for the log and the queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from relax_hpc.queue.client.status import StatusRequests

_REPORT_S = 5.0
"""Seconds between two reports."""


async def report_refusals(status: StatusRequests, server: str, refused: Counter[str]) -> None:
    """Report the reasons of refused requests of ``server`` to the queue, and their numbers to the
    log, until cancelled. ``refused``: number of refused requests by reason, which the server
    increases."""
    reported: Counter[str] = Counter()
    while True:
        await asyncio.sleep(_REPORT_S)
        for reason, count in (refused - reported).items():
            print(f"{count} requests refused: {reason}", flush=True)
            note = status.note(f"{server}_refused", server, reason)
            with contextlib.suppress(Exception):
                await asyncio.wrap_future(note)
        reported = Counter(refused)
