"""Where tickets are that are not trained yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.transfer_queue.controller.state.ticket_map import AgedTickets, TicketSet


@dataclass(slots=True)
class Tickets:
    """Tickets by what is to be done for them next."""

    next: int = 0
    """The lowest ticket that nobody was admitted to yet."""
    reissued: TicketSet = field(default_factory=TicketSet)
    """Tickets of `generating` that were taken back, and that nobody has."""
    generating: AgedTickets = field(default_factory=AgedTickets)
    """Tickets whose prompt groups have no rows."""
    untrained: AgedTickets = field(default_factory=AgedTickets)
    """Tickets whose prompt groups have rows that wait for training."""
    untrained_rows: int = 0
    """How many rows they have in all."""

    def admit(self, tickets: Sequence[int]) -> None:
        """Somebody generates for them."""
        for ticket in tickets:
            self.reissued.discard(ticket)
        self.next = max(self.next, *(ticket + 1 for ticket in tickets)) if tickets else self.next
        self.generating.discard(tickets)
        self.generating.add(tickets)

    def store(self, tickets: Sequence[int], rows: int) -> None:
        """Their rows have come, so many in all."""
        self.generating.discard(tickets)
        self.wait(tickets, rows)

    def wait(self, tickets: Iterable[int], rows: int) -> None:
        """They wait for training, with so many rows in all."""
        self.untrained.add(tickets)
        self.untrained_rows += rows

    def end_wait(self, tickets: Sequence[int], rows: int) -> None:
        """They, all of which waited for training, do so no more."""
        self.untrained.discard(tickets)
        self.untrained_rows -= rows

    def depth(self) -> dict[str, int]:
        """Prompt groups by how far they are: in generation, waiting for training."""
        return {"generating": len(self.generating), "ready": len(self.untrained), "reissued": len(self.reissued)}

    def dump(self) -> Any:
        """Where each of the others is follows from its prompt group."""
        return self.next, list(self.reissued)

    def load(self, values: Any) -> None:
        self.next, self.reissued = values[0], TicketSet(values[1])
