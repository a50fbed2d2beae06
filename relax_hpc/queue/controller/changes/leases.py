"""Changes of leases: windows are claimed and given back."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from relax_hpc.queue.controller.changes.prompt_groups import leave_place, reopen
from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.task_queues import HELD
from relax_hpc.queue.controller.topics import rows_for
from relax_hpc.queue.records import NO_STEP, Lease, Owner
from relax_hpc.queue.samplers import Assignment

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


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
    shards = tuple(sorted(state.by_shard(tickets, queue.needs)))
    lease = Lease(task, owner, key, tuple(tickets), shards, assignment)
    state.shards.hold(lease.shards)
    state.leases.add(number, lease)
    queue.take(lease.tickets)
    if queue.in_sets:
        _take_places(state, task, lease.tickets)
    if queue.in_order:
        state.woken.add(rows_for(task))


def _take_places(state: QueueState, task: str, tickets: tuple[int, ...]) -> None:
    """Give ``tickets`` the first free places in the order of training, as they come, unless another
    trainer did."""
    place = state.progress.trained[task] * state.plan.prompts_per_step
    for ticket in [ticket for ticket in tickets if state.groups[ticket].place == NO_STEP]:
        place = state.groups[ticket].place = state.order.take(place, ticket)


@applies("release")
def release(state: QueueState, lease: int) -> None:
    """The holder gives a lease back: what is left of its window is offered again as it was."""
    held = _end(state, lease)
    queue = state.tasks[held.task]
    # A whole step may have been taken for a few of its tickets.
    tickets = tuple(ticket for ticket in held.tickets if queue.statuses[ticket] == HELD)
    for ticket in tickets:
        if queue.in_sets and not state.is_taken(ticket, but=held.task):
            leave_place(state, ticket)
        reopen(state, held.task, ticket)
    if tickets and queue.in_order:
        bisect.insort(queue.returned, tickets)


def consume(state: QueueState, lease: int) -> None:
    """Consumed are the tickets that have what the task gives; others (their rows were refused) are
    ready again."""
    held = _end(state, lease)
    groups, queue = state.groups, state.tasks[held.task]
    given = [
        ticket for ticket in held.tickets if groups[ticket].present & queue.gives == queue.gives
    ]
    queue.consume(given)
    if len(given) < len(held.tickets):
        for ticket in set(held.tickets).difference(given):
            reopen(state, held.task, ticket)


def _end(state: QueueState, lease: int) -> Lease:
    held = state.leases.end(lease)
    state.shards.let_go(held.shards)
    return held
