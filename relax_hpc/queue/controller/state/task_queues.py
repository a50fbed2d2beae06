"""Status of each ticket for each task, so that the cost of a claim depends on its size and not on
the size of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.controller.state.ticket_map import TicketMap
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import FieldBits

WAITING, READY, HELD, DONE = range(4)
"""Status of a ticket for one task: a needed field is missing, it can be taken, a lease holds it, it
is consumed."""


@dataclass(slots=True)
class TaskQueue:
    """One task's view of all tickets. `needs` and `gives` are masks of `FieldBits`."""

    needs: int
    gives: int
    in_order: bool
    whole_step: bool = False
    in_sets: bool = False
    statuses: TicketMap = field(default_factory=TicketMap)
    position: int = 0
    """Lowest ticket that may not be taken yet."""
    returned: list[tuple[int, ...]] = field(default_factory=list)
    """Windows of released leases, ascending. They are offered again unchanged."""
    low: int = field(default=0, compare=False)
    """Lowest ticket that may be ready."""

    def lowest_ready(self) -> int:
        """The lowest ticket that can be taken; the end of all tickets if no ticket is ready."""
        ticket = self.statuses.find(READY, max(self.low, self.position))
        return ticket if ticket >= 0 else self.statuses.end

    def lowest_waiting(self) -> int:
        """The lowest ticket that lacks a needed field."""
        return self.statuses.lowest_unset(self.position)

    def offer(self, tickets: Sequence[int]) -> None:
        """Mark ``tickets`` as ready, because they have all needed fields. Tickets that are held or
        consumed do not change."""
        self.statuses.change(tickets, WAITING, READY)
        self.low = min(self.low, *tickets)

    def take(self, tickets: tuple[int, ...]) -> None:
        """Take ``tickets`` for a lease."""
        self.statuses.change(tickets, READY, HELD)
        if self.returned:
            windows = [
                tuple(ticket for ticket in window if self.statuses[ticket] < HELD)
                for window in self.returned
            ]
            self.returned = [window for window in windows if window]
        self._raise_low()
        self._advance()

    def consume(self, tickets: Sequence[int]) -> None:
        self.statuses.change(tickets, HELD, DONE)

    def reopen(self, ticket: int, ready: bool) -> None:
        """Open ``ticket`` again: not held; ``ready``: it has all needed fields."""
        self.statuses[ticket] = READY if ready else WAITING
        self.position = min(self.position, ticket)
        self.low = min(self.low, ticket)
        self._raise_low()

    def rewind(self, first: int) -> None:
        """Cut windows again from ticket ``first`` on."""
        self.position, self.returned = first, []
        self._advance()

    def forget(self, below: int) -> None:
        """Forget tickets lower than ``below``."""
        self.statuses.forget(below)
        self.position = max(self.position, below)
        self._advance()

    def _raise_low(self) -> None:
        if self.statuses[self.low] != READY:
            ticket = self.statuses.find(READY, self.low)
            self.low = ticket if ticket >= 0 else max(self.low, self.statuses.end)

    def _advance(self) -> None:
        while self.statuses[self.position] >= HELD:
            self.position += 1

    def dump(self) -> Any:
        return self.statuses.dump(), self.position, self.returned

    def load(self, values: Any) -> None:
        statuses, self.position, returned = values
        self.statuses, self.returned = TicketMap(*statuses), [tuple(window) for window in returned]


class TaskQueues(dict[str, TaskQueue]):
    """The queue of each task, by its name."""

    def __init__(self, plan: Plan, bits: FieldBits) -> None:
        super().__init__(
            (
                name,
                TaskQueue(
                    bits.mask(t.needs), bits.mask(t.gives), t.in_order, t.whole_step, t.in_sets
                ),
            )
            for name, t in plan.tasks.items()
        )
        self.in_sets = [name for name, task in plan.tasks.items() if task.in_sets]
        """Tasks whose windows are parts of step sets. Without any, step t trains the tickets of
        t."""

    def hold_any(self, tickets: Sequence[int]) -> bool:
        """Whether a lease of any task has one of ``tickets``."""
        first, end = min(tickets), max(tickets) + 1
        return any(queue.statuses.find(HELD, first, end) >= 0 for queue in self.values())

    def dump(self) -> Any:
        return {name: queue.dump() for name, queue in self.items()}

    def load(self, values: Any) -> None:
        for name, queue in values.items():
            self[name].load(queue)
