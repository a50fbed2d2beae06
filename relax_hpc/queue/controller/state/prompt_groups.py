"""All prompt groups that are not retired: their owner, their fields, and the shards of these.

The functions below are steps of several appliers: they drop, reopen and detach prompt groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
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
        """Numbers of the shards in which they lie, and how many of them in each."""
        return Counter([number for ticket in tickets for number, _ in self[ticket].parts])

    def rows_of(self, tickets: Iterable[int]) -> int:
        """Rows that ``tickets`` have in all."""
        return sum(self[ticket].rows for ticket in tickets)

    def dump(self) -> Any:
        """Part by part, which many of them have in common, and the groups."""
        parts = {
            part: n
            for n, part in enumerate(dict.fromkeys(part for g in self.values() for part in g.parts))
        }
        groups = [
            (
                (ticket, g.owner, g.attempt, g.filtered, g.last, g.position),
                (g.lengths, g.episodes, list(g.versions), g.media),
                (g.old_version, [parts[part] for part in g.parts]),
            )
            for ticket, g in self.items()
        ]
        return list(parts), groups

    def load(self, values: Any, bits: FieldBits) -> None:
        parts: list[ShardFields] = [(number, tuple(fields)) for number, fields in values[0]]
        for (ticket, owner, attempt, filtered, last, place), rows, (old_version, numbers) in values[
            1
        ]:
            group = PromptGroup((owner[0], owner[1]) if owner else None, attempt, filtered)
            group.last, group.position, group.old_version = last, place, old_version
            lengths, episodes, versions, media = rows
            if lengths:
                group.declare(lengths, same_bytes(episodes), shared(tuple(versions)), media)
            group.parts = tuple(parts[number] for number in numbers)
            for _, fields in group.parts:
                group.present |= bits.mask(fields)
            self[ticket] = group


@lru_cache(maxsize=4096)
def same_bytes(data: bytes) -> bytes:
    """One object for all prompt groups whose episodes have as many rows."""
    return data


@lru_cache(maxsize=4096)
def shared(codes: tuple[int, ...]) -> frozenset[int]:
    """One object for all prompt groups with the same versions."""
    return frozenset(codes)


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


def withdraw(state: QueueState, ticket: int, part: ShardFields) -> None:
    """Take the fields of ``part`` from a prompt group: whose task gave them must give them
    again."""
    group = state.groups[ticket]
    group.parts = tuple(other for other in group.parts if other != part)
    group.present = 0
    for _, fields in group.parts:
        group.present |= state.bits.mask(fields)
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
    if group.position != NO_STEP:
        state.order.leave(group.position)
        group.position = NO_STEP


def detach(state: QueueState, tickets: Sequence[int]) -> None:
    """No shard or lease knows them any more. All of them wait for training, or none."""
    if untrained := tickets[0] in state.tickets.untrained:
        state.tickets.end_wait(tickets, state.groups.rows_of(tickets))
    for number, count in state.groups.shards_of(tickets).items():
        state.shards.drop(number, count, count * untrained)
    if state.tasks.hold_any(tickets):
        state.leases.shrink(tickets, state.groups)
    state.tickets.generating.discard(tickets)
