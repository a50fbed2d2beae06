"""All prompt groups that are not retired: their owner, their fields, and the shards of these.

The functions below are steps of several appliers: they drop, reopen and detach prompt groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.state.segments import lose_log
from relax_hpc.queue.controller.state.task_queues import DONE, HELD
from relax_hpc.queue.controller.topics import ADMISSION, rows_for
from relax_hpc.queue.records import NO_STEP, FieldBits, PromptGroup, ShardFields

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


class PromptGroups(dict[int, PromptGroup]):
    """Prompt groups by ticket."""

    def shards_of(self, tickets: Iterable[int]) -> Counter[int]:
        """Numbers of the shards of ``tickets``, and how many fields of them each shard has."""
        numbers: list[int] = []
        for ticket in tickets:
            numbers += [number for number, _ in self[ticket].parts]
        return Counter(numbers)

    def rows_of(self, tickets: Iterable[int]) -> int:
        """Number of rows of all ``tickets``."""
        return sum(self[ticket].rows for ticket in tickets)

    def dump(self) -> Any:
        """The distinct parts, which many groups share, and the groups with numbers of parts."""
        distinct = dict.fromkeys(chain.from_iterable(group.parts for group in self.values()))
        numbers = {part: number for number, part in enumerate(distinct)}
        groups = [
            (
                (ticket, g.owner, g.attempt, g.filtered, g.last_step, g.position),
                (g.lengths, g.episodes, list(g.versions), g.media),
                (g.old_version, [numbers[part] for part in g.parts]),
            )
            for ticket, g in self.items()
        ]
        return list(numbers), groups

    def load(self, values: Any, bits: FieldBits) -> None:
        all_shard_fields: list[ShardFields] = [
            (number, tuple(fields)) for number, fields in values[0]
        ]
        for head, rows, (old_version, numbers) in values[1]:
            ticket, owner, attempt, filtered, last, position = head
            group = PromptGroup((owner[0], owner[1]) if owner else None, attempt, filtered)
            group.last_step, group.position, group.old_version = last, position, old_version
            lengths, episodes, versions, media = rows
            if lengths:
                group.declare(
                    lengths, shared_bytes(episodes), shared_versions(tuple(versions)), media
                )
            group.parts = tuple(all_shard_fields[number] for number in numbers)
            for _, fields in group.parts:
                group.present |= bits.mask(fields)
            self[ticket] = group


@lru_cache(maxsize=4096)
def shared_bytes(data: bytes) -> bytes:
    """One object for equal `episodes` of all prompt groups."""
    return data


@lru_cache(maxsize=4096)
def shared_versions(codes: tuple[int, ...]) -> frozenset[int]:
    """One object for equal `versions` of all prompt groups."""
    return frozenset(codes)


def drop(state: QueueState, ticket: int, reason: str) -> None:
    """Count the rows of ``ticket`` as dropped and offer the ticket again.

    If its rows are unknown, it counts as one row for each episode, and has one event.
    """
    episodes = state.groups[ticket].episodes
    state.counts.dropped[reason] += sum(episodes or state.plan.undeclared)
    state.events.add_rows("dropped", episodes, [ticket], reason=reason)
    if reason != "lost":
        lose_log(state, ticket, reason)
    group = state.groups[ticket]
    leave_position(state, ticket)
    detach(state, [ticket])
    state.groups[ticket] = PromptGroup(None, group.attempt, group.filtered)
    state.tickets.generating.add([ticket])
    for task in state.tasks:
        reopen(state, task, ticket)
    reissue(state, ticket)


def reissue(state: QueueState, ticket: int) -> None:
    """Allow another admission of ``ticket``, which has no rows and no owner."""
    state.tickets.reissued.add(ticket)
    state.groups[ticket].last_step = state.last_step(state.segments.versions(ticket))
    # A trainer may have waited for this ticket, and need not wait for it any more.
    state.woken |= {ADMISSION, *map(rows_for, state.tasks.in_sets)}


def withdraw(state: QueueState, ticket: int, shard_fields: ShardFields) -> None:
    """Remove the fields of ``shard_fields`` from a prompt group. The task that added them must add
    them again."""
    group = state.groups[ticket]
    group.parts = tuple(present for present in group.parts if present != shard_fields)
    group.present = 0
    for _, fields in group.parts:
        group.present |= state.bits.mask(fields)
    if not group.has(state.scored):
        group.old_version = 0
    state.shards.drop(shard_fields[0], 1, int(ticket in state.tickets.untrained))
    for task, queue in state.tasks.items():
        status = queue.statuses[ticket]
        if status != HELD and not (status == DONE and group.has(queue.gives)):
            reopen(state, task, ticket)


def reopen(state: QueueState, task: str, ticket: int) -> None:
    """Open ``ticket`` to ``task`` again: not held, and ready if it has all fields that the task
    needs."""
    queue = state.tasks[task]
    queue.reopen(ticket, state.groups[ticket].has(queue.needs))
    state.woken.add(rows_for(task))


def leave_position(state: QueueState, ticket: int) -> None:
    """Free the position of ``ticket`` in the order of training, if it has one."""
    group = state.groups[ticket]
    if group.position != NO_STEP:
        state.order.clear(group.position)
        group.position = NO_STEP


def detach(state: QueueState, tickets: Sequence[int]) -> None:
    """Remove tickets from shards, leases and waiting lists. Either all of them wait for training,
    or none does."""
    untrained = tickets[0] in state.tickets.untrained
    if untrained:
        state.tickets.end_wait(tickets, state.groups.rows_of(tickets))
    for number, count in state.groups.shards_of(tickets).items():
        state.shards.drop(number, count, count * untrained)
    if state.tasks.hold_any(tickets):
        state.leases.remove_tickets(tickets, state.groups)
    state.tickets.generating.discard(tickets)
