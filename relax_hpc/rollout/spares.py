"""Over-sampling: the next attempts at some tickets, begun before it is known whether they are
needed.

A spare is what its own ticket would be given next anyway, so that what a ticket is trained on does
not depend on spares, nor on which of them is quick.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from relax_hpc.rollout.attempt import Attempt


@dataclass(frozen=True, slots=True)
class Spare:
    """An attempt that is drawn beside the one asked for."""

    attempt: Attempt
    drawing: asyncio.Task[bool]
    """Task that fills the attempt; its result: whether the engine gave a good answer to all."""

    async def abort(self) -> None:
        """Have the engine give up what it has not finished of it."""
        self.drawing.cancel()
        await asyncio.gather(self.drawing, return_exceptions=True)


def has_spare(ticket: int, share: float) -> bool:
    """Whether ``ticket`` is among those, a ``share`` of all and evenly spread, that get a spare
    attempt."""
    return int((ticket + 1) * share) > int(ticket * share)
