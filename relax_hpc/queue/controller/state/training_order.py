"""The order in which prompt groups are trained."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.records import NO_STEP


@dataclass(slots=True)
class TrainingOrder:
    """Places in the order of training: step t trains those from t x prompts_per_step on. Where
    steps have no sets, places are tickets, and `tickets` is without use."""

    tickets: array[int] = field(default_factory=lambda: array("q"))
    """Tickets by place; NO_STEP where there is none yet."""
    first: int = 0
    """The lowest place that is not retired."""

    def take(self, start: int, ticket: int) -> int:
        """``ticket`` has the first free place from ``start`` on; that place."""
        place = start
        while place < len(self.tickets) and self.tickets[place] != NO_STEP:
            place += 1
        self.tickets.extend([NO_STEP] * (place + 1 - len(self.tickets)))
        self.tickets[place] = ticket
        return place

    def leave(self, place: int) -> None:
        self.tickets[place] = NO_STEP

    def between(self, first: int, end: int | None = None) -> list[int]:
        """The tickets that have these places."""
        return [ticket for ticket in self.tickets[first:end] if ticket != NO_STEP]

    def dump(self) -> Any:
        return self.tickets.tobytes(), self.first

    def load(self, values: Any) -> None:
        self.tickets = array("q", values[0])
        self.first = values[1]
