"""Over-sampling: spares are the next attempts at some tickets, started before it is known whether
they are needed.

A spare is the attempt that its ticket would get next anyway. The rows that a ticket is trained on
therefore do not depend on spares or on their speed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from relax_hpc.rollout.attempt import Attempt


@dataclass(frozen=True, slots=True)
class Spare:
    """An attempt that is generated in parallel to the present one of its ticket."""

    attempt: Attempt
    generating: asyncio.Task[bool]
    """Task that generates the attempt; it returns whether all responses are good."""

    async def abort(self) -> None:
        """Stop the generation."""
        self.generating.cancel()
        await asyncio.gather(self.generating, return_exceptions=True)


def has_spare(ticket: int, share: float) -> bool:
    """Whether ``ticket`` gets a spare attempt: a ``share`` of all tickets does, evenly spread."""
    return int((ticket + 1) * share) > int(ticket * share)
