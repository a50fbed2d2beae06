"""Tickets that are not trained yet, by what is to be done for them next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.controller.state.ticket_map import AgedTickets, TicketSet


@dataclass(slots=True)
class Tickets:
    """Tickets by what is to be done for them next."""

    next: int = 0
    """Lowest ticket that was never admitted."""
    reissued: TicketSet = field(default_factory=TicketSet)
    """Tickets of `generating` that were taken back, and that nobody has."""
    generating: AgedTickets = field(default_factory=AgedTickets)
    """Tickets whose prompt groups have no rows."""
    untrained: AgedTickets = field(default_factory=AgedTickets)
    """Tickets whose prompt groups have rows that wait for training."""
    untrained_rows: int = 0
    """Rows of the `untrained` in all."""

    def admit(self, tickets: Sequence[int]) -> None:
        """Count ``tickets`` as being generated."""
        for ticket in tickets:
            self.reissued.discard(ticket)
        self.next = max(self.next, *(ticket + 1 for ticket in tickets)) if tickets else self.next
        self.generating.discard(tickets)
        self.generating.add(tickets)

    def store(self, tickets: Sequence[int], rows: int) -> None:
        """Count ``tickets``, whose ``rows`` rows have come, as waiting for training."""
        self.generating.discard(tickets)
        self.wait(tickets, rows)

    def wait(self, tickets: Iterable[int], rows: int) -> None:
        """Count ``tickets``, with ``rows`` rows in all, as waiting for training."""
        self.untrained.add(tickets)
        self.untrained_rows += rows

    def end_wait(self, tickets: Sequence[int], rows: int) -> None:
        """Count ``tickets``, all of which waited for training, as waiting no more."""
        self.untrained.discard(tickets)
        self.untrained_rows -= rows

    def depth(self) -> dict[str, int]:
        """Prompt groups by how far they are: in generation, waiting for training."""
        return {
            "generating": len(self.generating),
            "ready": len(self.untrained),
            "reissued": len(self.reissued),
        }

    def dump(self) -> Any:
        """Values for a snapshot: the place of every other ticket follows from its prompt group."""
        return self.next, list(self.reissued)

    def load(self, values: Any) -> None:
        self.next, self.reissued = values[0], TicketSet(values[1])
