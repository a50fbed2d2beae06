"""Tickets that each task may take, holds and has consumed, so that a claim costs by its size and
not by the queue's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.controller.state.ticket_map import TicketMap
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import FieldBits

WAITING, READY, HELD, DONE = range(4)
"""Status of a ticket for one task: not all that it needs is there, it may be taken, a lease has it,
it was consumed."""


@dataclass(slots=True)
class TaskQueue:
    """One task's view of all tickets. `needs` and `gives` are `FieldBits`."""

    needs: int
    gives: int
    in_order: bool
    whole_step: bool = False
    in_sets: bool = False
    statuses: TicketMap = field(default_factory=TicketMap)
    position: int = 0
    """Lowest ticket that may be left to take."""
    returned: list[tuple[int, ...]] = field(default_factory=list)
    """Windows that were given back, ascending: they are offered again as they were."""
    low: int = field(default=0, compare=False)
    """Lowest ticket that may be ready."""

    def lowest_ready(self) -> int:
        """The lowest ticket that may be taken; one beyond all tickets if there is none."""
        found = self.statuses.find(READY, max(self.low, self.position))
        return found if found >= 0 else self.statuses.end

    def lowest_waiting(self) -> int:
        """The lowest ticket that is left to take and lacks something that they need."""
        return self.statuses.lowest_unset(self.position)

    def offer(self, tickets: Sequence[int]) -> None:
        """Offer ``tickets``, of which all that the task needs is there now; those that are taken
        stay so."""
        self.statuses.change(tickets, WAITING, READY)
        self.low = min(self.low, *tickets)

    def take(self, tickets: tuple[int, ...]) -> None:
        """Take ``tickets`` for a lease."""
        self.statuses.change(tickets, READY, HELD)
        if self.returned:
            left = [tuple(t for t in window if self.statuses[t] < HELD) for window in self.returned]
            self.returned = [window for window in left if window]
        self._raise_low()
        self._advance()

    def consume(self, tickets: Sequence[int]) -> None:
        self.statuses.change(tickets, HELD, DONE)

    def reopen(self, ticket: int, ready: bool) -> None:
        """Open ``ticket`` again: not taken; ``ready``: whether it has all that the task needs."""
        self.statuses[ticket] = READY if ready else WAITING
        self.position = min(self.position, ticket)
        self.low = min(self.low, ticket)
        self._raise_low()

    def rewind(self, first: int) -> None:
        """Cut windows anew from ticket ``first`` on."""
        self.position, self.returned = first, []
        self._advance()

    def forget(self, below: int) -> None:
        """Forget tickets lower than ``below``."""
        self.statuses.forget(below)
        self.position = max(self.position, below)
        self._advance()

    def _raise_low(self) -> None:
        if self.statuses[self.low] != READY:
            found = self.statuses.find(READY, self.low)
            self.low = found if found >= 0 else max(self.low, self.statuses.end)

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
        """Tasks that take steps' sets; without any, step t trains the tickets of t."""

    def hold_any(self, tickets: Sequence[int]) -> bool:
        """Whether a lease of any task has one of ``tickets``."""
        first, end = min(tickets), max(tickets) + 1
        return any(queue.statuses.find(HELD, first, end) >= 0 for queue in self.values())

    def dump(self) -> Any:
        return {name: queue.dump() for name, queue in self.items()}

    def load(self, values: Any) -> None:
        for name, queue in values.items():
            self[name].load(queue)
