"""Common parts of changes: prompt groups are dropped, drawn again, and forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_hpc.queue.controller.changes.segments import lose_log
from relax_hpc.queue.controller.state.task_queues import DONE, HELD
from relax_hpc.queue.controller.topics import ADMISSION, rows_for
from relax_hpc.queue.records import NO_STEP, Part, PromptGroup

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


def drop(state: QueueState, ticket: int, reason: str) -> None:
    """Count the rows of ``ticket`` as dropped and offer the ticket again.

    Of one that has none, or of which nobody knows them any more, the prompt group is told, and
    counts for one an episode.
    """
    episodes = state.groups[ticket].episodes
    state.counts.dropped[reason] += sum(episodes or state.plan.undeclared)
    state.events.tell_rows("dropped", episodes, [ticket], reason=reason)
    if reason != "lost":
        lose_log(state, ticket, reason)
    group = state.groups[ticket]
    leave_place(state, ticket)
    detach(state, [ticket])
    state.groups[ticket] = PromptGroup(None, group.attempt, group.filtered)
    state.tickets.generating.add([ticket])
    for task in state.tasks:
        reopen(state, task, ticket)
    reissue(state, ticket)


def reissue(state: QueueState, ticket: int) -> None:
    """Somebody else may be admitted to ``ticket``, which is in generation."""
    state.tickets.reissued.add(ticket)
    state.groups[ticket].last = state.last_step(state.segments.versions(ticket))
    # Who waits to train may wait for it no more.
    state.woken |= {ADMISSION, *map(rows_for, state.tasks.in_sets)}


def withdraw(state: QueueState, ticket: int, part: Part) -> None:
    """Take the fields of ``part`` from a prompt group: whose task gave them must give them
    again."""
    group = state.groups[ticket]
    group.parts = tuple(other for other in group.parts if other != part)
    group.present = 0
    for _, fields in group.parts:
        group.present |= state.bits.of(fields)
    if not group.has(state.scored):
        group.old_version = 0
    state.shards.drop(part[0], 1, int(ticket in state.tickets.untrained))
    for task, queue in state.tasks.items():
        status = queue.statuses[ticket]
        if status != HELD and not (status == DONE and group.has(queue.gives)):
            reopen(state, task, ticket)


def reopen(state: QueueState, task: str, ticket: int) -> None:
    """Open ``ticket`` to ``task`` again: not taken, and ready if it has all that the task needs."""
    queue = state.tasks[task]
    queue.reopen(ticket, state.groups[ticket].has(queue.needs))
    state.woken.add(rows_for(task))


def leave_place(state: QueueState, ticket: int) -> None:
    """Take the place in the order of training from ``ticket``, if it has one."""
    group = state.groups[ticket]
    if group.place != NO_STEP:
        state.order.leave(group.place)
        group.place = NO_STEP


def detach(state: QueueState, tickets: Sequence[int]) -> None:
    """No shard or lease knows them any more. All of them wait for training, or none."""
    if untrained := tickets[0] in state.tickets.untrained:
        state.tickets.end_wait(tickets, state.groups.rows_of(tickets))
    for number, count in state.groups.shards_of(tickets).items():
        state.shards.drop(number, count, count * untrained)
    if state.tasks.hold_any(tickets):
        state.leases.shrink(tickets, state.groups)
    state.tickets.generating.discard(tickets)
