"""Over-sampling: the next attempts at some tickets, begun before it is known whether they are needed."""

from __future__ import annotations

import asyncio

from relax_hpc.rollout.engine import Draft
from relax_hpc.rollout.unfinished import Unfinished, Work


def has_spare(ticket: int, share: float) -> bool:
    """Whether ``ticket`` is among those, a ``share`` of all and evenly spread, that get a spare group."""
    return int((ticket + 1) * share) > int(ticket * share)


class Spares:
    """Prompt groups that are drawn beside those of one request.

    A spare is what its own ticket would be given next anyway, so that what a ticket is trained on does not depend on
    spares, nor on which of them is quick.
    """

    def __init__(self, groups: Unfinished, drawing: asyncio.Task[None] | None) -> None:
        """``drawing`` fills ``groups``; None if there are none."""
        self.groups = groups
        self._drawing = drawing
        self.left = dict(groups.work)
        """Ticket -> attempt of those that were not needed yet."""

    async def of(self, work: Work) -> dict[int, list[Draft]]:
        """By ticket, what was drawn of these very attempts, however long it takes; they are no spares any more."""
        needed = [ticket for ticket, attempt in work if self.left.get(ticket) == attempt]
        if needed:
            await self.drawn()
        for ticket in needed:
            del self.left[ticket]
        return {ticket: self.groups.of(ticket) for ticket in needed}

    async def drawn(self) -> None:
        """Return when the engine has answered."""
        if self._drawing:
            await self._drawing

    async def abort(self) -> None:
        """Have the engine give up what it has not finished."""
        if self._drawing:
            self._drawing.cancel()
            await asyncio.gather(self._drawing, return_exceptions=True)

    def whole(self) -> Work:
        """Those left that are finished."""
        return [work for work in self.left.items() if all(draft.ended for draft in self.groups.of(work[0]))]
