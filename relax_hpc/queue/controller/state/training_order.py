"""The order in which prompt groups are trained."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.records import NO_STEP


@dataclass(slots=True)
class TrainingOrder:
    """Positions in the order of training: step t trains those from t x prompts_per_step on. If
    steps have no sets, positions are tickets, and `tickets` is not used."""

    tickets: array[int] = field(default_factory=lambda: array("q"))
    """Tickets by position; NO_STEP for a free position."""
    first: int = 0
    """The lowest position that is not retired."""

    def assign(self, start: int, ticket: int) -> int:
        """Give ``ticket`` the first free position from ``start`` on; that position."""
        position = start
        while position < len(self.tickets) and self.tickets[position] != NO_STEP:
            position += 1
        self.tickets.extend([NO_STEP] * (position + 1 - len(self.tickets)))
        self.tickets[position] = ticket
        return position

    def clear(self, position: int) -> None:
        self.tickets[position] = NO_STEP

    def between(self, first: int, end: int | None = None) -> list[int]:
        """The tickets at these positions, without free ones."""
        return [ticket for ticket in self.tickets[first:end] if ticket != NO_STEP]

    def dump(self) -> Any:
        return self.tickets.tobytes(), self.first

    def load(self, values: Any) -> None:
        self.tickets = array("q", values[0])
        self.first = values[1]
