"""Leases of consumers, and the records that claim windows and return them."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.prompt_groups import PromptGroups, leave_position, reopen
from relax_hpc.queue.controller.state.task_queues import HELD
from relax_hpc.queue.controller.topics import rows_for
from relax_hpc.queue.records import NO_STEP, Lease, Owner
from relax_hpc.queue.samplers import Assignment, select_rows

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@dataclass(slots=True)
class Leases:
    """Leases by number. A number is never used again."""

    _held: dict[int, Lease] = field(default_factory=dict)
    by_key: dict[str, int] = field(default_factory=dict)
    """Numbers by the key of the request for the lease."""
    next: int = 1

    def add(self, number: int, lease: Lease) -> None:
        self._held[number] = lease
        self.by_key[lease.key] = number
        self.next = max(self.next, number + 1)

    def end(self, number: int) -> Lease:
        lease = self._held.pop(number)
        self.by_key.pop(lease.key, None)
        return lease

    def held_by_group(self, group: str, below: int) -> list[int]:
        """Numbers of the leases of incarnations of ``group`` before incarnation ``below``."""
        numbers = []
        for number, lease in self._held.items():
            holder, incarnation = lease.owner
            if holder == group and incarnation < below:
                numbers.append(number)
        return numbers

    def held_by_tasks(self, tasks: Collection[str]) -> list[int]:
        """Numbers of the leases of ``tasks``."""
        return [number for number, lease in self._held.items() if lease.task in tasks]

    def remove_tickets(self, tickets: Iterable[int], groups: PromptGroups) -> None:
        """Remove ``tickets`` from all leases."""
        removed = set(tickets)
        for lease in self._held.values():
            if removed.isdisjoint(lease.tickets):
                continue
            ticket_of_row: list[int] = []
            for ticket in lease.tickets:
                ticket_of_row += [ticket] * groups[ticket].rows
            rows = [row for row, ticket in enumerate(ticket_of_row) if ticket not in removed]
            lease.tickets = tuple(ticket for ticket in lease.tickets if ticket not in removed)
            lease.assignment = select_rows(lease.assignment, rows)

    def __getitem__(self, number: int) -> Lease:
        return self._held[number]

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def get(self, number: int) -> Lease | None:
        return self._held.get(number)

    def values(self) -> ValuesView[Lease]:
        return self._held.values()

    def __len__(self) -> int:
        return len(self._held)

    def dump(self) -> Any:
        leases = [
            (n, v.task, v.owner, v.key, v.tickets, v.shards, v.assignment)
            for n, v in self._held.items()
        ]
        return self.next, leases

    def load(self, values: Any) -> None:
        for number, task, owner, key, tickets, shards, assignment in values[1]:
            lease = Lease(
                task, (owner[0], owner[1]), key, tuple(tickets), tuple(shards), assignment
            )
            self.add(number, lease)
        self.next = values[0]


@applies("claim")
def claim(
    state: QueueState,
    task: str,
    owner: Owner,
    key: str,
    number: int,
    tickets: list[int],
    assignment: Assignment,
) -> None:
    queue = state.tasks[task]
    shards = tuple(sorted(state.tickets_by_shard(tickets, queue.needs)))
    lease = Lease(task, owner, key, tuple(tickets), shards, assignment)
    state.shards.hold(lease.shards)
    state.leases.add(number, lease)
    queue.take(lease.tickets)
    if queue.in_sets:
        _assign_positions(state, task, lease.tickets)
    if queue.in_order:
        state.woken.add(rows_for(task))


def _assign_positions(state: QueueState, task: str, tickets: tuple[int, ...]) -> None:
    """Give each of ``tickets`` the first free position in the order of training, unless it has one
    from another trainer's claim."""
    position = state.progress.trained[task] * state.plan.prompts_per_step
    for ticket in tickets:
        if state.groups[ticket].position == NO_STEP:
            position = state.order.assign(position, ticket)
            state.groups[ticket].position = position


@applies("release")
def release(state: QueueState, lease: int) -> None:
    """The holder releases the lease. The remaining tickets of its window are offered again as one
    window."""
    held = _end(state, lease)
    queue = state.tasks[held.task]
    # A task of whole steps may hold a whole step although only a few of its tickets were ready.
    tickets = tuple(ticket for ticket in held.tickets if queue.statuses[ticket] == HELD)
    for ticket in tickets:
        if queue.in_sets and not state.is_taken(ticket, but=held.task):
            leave_position(state, ticket)
        reopen(state, held.task, ticket)
    if tickets and queue.in_order:
        bisect.insort(queue.returned, tickets)


def consume(state: QueueState, lease: int) -> None:
    """Mark tickets of the lease as consumed if they have the fields that the task adds. The others,
    whose rows were refused, become ready again."""
    held = _end(state, lease)
    groups, queue = state.groups, state.tasks[held.task]
    consumed = [ticket for ticket in held.tickets if groups[ticket].has(queue.gives)]
    queue.consume(consumed)
    if len(consumed) < len(held.tickets):
        for ticket in set(held.tickets).difference(consumed):
            reopen(state, held.task, ticket)


def _end(state: QueueState, lease: int) -> Lease:
    held = state.leases.end(lease)
    state.shards.release(held.shards)
    return held
