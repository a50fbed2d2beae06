"""Keeping parts of prompt groups in generation, and surplus groups; see `state.kept`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from relax_hpc.transfer_queue.controller.registry import applies
from relax_hpc.transfer_queue.controller.state.kept import Handed, KeptGroup
from relax_hpc.transfer_queue.controller.topics import ADMISSION
from relax_hpc.transfer_queue.records import NO_STEP, Shard

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.controller.state.queue_state import QueueState


@applies("keep")
def keep(
    state: QueueState,
    key: str,
    owner: list,
    shard: dict,
    rows: list[Handed],
    fields: list[str],
    surplus: bool,
    refused: dict[int, str],
) -> None:
    who = (owner[0], owner[1])
    state.puts.remember(key, who, refused)
    for ticket, _, samples, *_ in [row for row in rows if row[0] in refused]:
        tokens = sum(sample[1] for sample in samples)
        state.kept.total += tokens
        state.kept.lost[refused[ticket]] += tokens
    taken = [row for row in rows if row[0] not in refused]
    count = sum(len(row[2]) for row in taken)
    if count:
        _keep(state, state.shards.add(Shard(shard, tuple(fields), who, (), count, count)), taken, surplus)
    else:
        state.shards.garbage.append(shard["name"])


def _keep(state: QueueState, number: int, rows: Iterable[Handed], surplus: bool) -> None:
    """Parts of groups, or whole ones without a ticket, lie in shard ``number``."""
    kept = state.kept
    for handed in rows:
        ticket, attempt = handed[:2]
        if surplus:
            group = kept.surplus[kept.next_number] = KeptGroup(ticket, attempt)
            state.media.hold(-kept.next_number, state.media.of(ticket))
            kept.next_number += 1
        else:
            group = _group_to_keep(state, ticket, attempt)
        for old, count in kept.merge(group, number, handed).items():
            state.shards.drop(old, count, count)
        state.events.tell("surplus" if surplus else "kept", [ticket])


def _group_to_keep(state: QueueState, ticket: int, attempt: int) -> KeptGroup:
    """Of ``ticket``; a surplus group that it was given, and that its owner could not use, makes room."""
    group = state.kept.groups.get(ticket)
    if group and (group.source, group.attempt) != (ticket, attempt):
        state.kept.again += group.tokens
        _leave_shards(state, group)
        group = None
    state.kept.groups[ticket] = group or KeptGroup(ticket, attempt)
    return state.kept.groups[ticket]


@applies("bind")
def bind(state: QueueState, surplus: Mapping[int, int]) -> None:
    """Surplus groups get tickets (ticket -> number): they are parts of these from now on."""
    for ticket, number in surplus.items():
        state.kept.groups[ticket] = state.kept.surplus.pop(number)
        state.groups[ticket].last = min(state.groups[ticket].last, last_step_of_kept(state, ticket))
        state.media.hold(ticket, state.media.of(-number))
        state.media.release(-number)


@applies("media")
def hold_media(state: QueueState, ticket: int, ids: list[str]) -> None:
    state.media.hold(ticket, ids)


def last_step_of_kept(state: QueueState, ticket: int) -> int:
    """The last step that may train what is kept of ``ticket``; NO_STEP: nothing is."""
    return state.last_step(state.kept.groups[ticket].versions) if ticket in state.kept.groups else NO_STEP


def use_kept(state: QueueState, tickets: Iterable[int]) -> None:
    """Their rows are accepted, and hold what was kept, or as much of it as their maker knew."""
    for ticket in [ticket for ticket in tickets if ticket in state.kept.groups]:
        group = state.kept.groups.pop(ticket)
        state.kept.used += group.reused
        state.kept.again += group.tokens - group.reused
        _leave_shards(state, group)


def lose_kept(state: QueueState, ticket: int, reason: str) -> None:
    """Another attempt takes its place, or nobody may use it any more."""
    if ticket in state.kept.groups:
        _lose_group(state, state.kept.groups.pop(ticket), reason)
        if ticket in state.tickets.reissued:
            state.groups[ticket].last = NO_STEP


def _lose_surplus(state: QueueState, number: int, reason: str) -> None:
    _lose_group(state, state.kept.surplus.pop(number), reason)
    state.media.release(-number)


def _lose_group(state: QueueState, group: KeptGroup, reason: str) -> None:
    state.kept.lost[reason] += group.tokens
    _leave_shards(state, group)
    state.events.tell("unkept", [group.source], reason=reason)


def _leave_shards(state: QueueState, group: KeptGroup) -> None:
    """It is not kept any more."""
    for number, count in group.shards.items():
        state.shards.drop(number, count, count)
    state.woken.add(ADMISSION)


def lose_rolled_back(state: QueueState) -> None:
    """After the lineage changed."""
    origin, kept = state.lineage.origin, state.kept
    for ticket in [t for t, group in kept.groups.items() if not origin(tuple(group.versions))[0]]:
        lose_kept(state, ticket, "rolled_back")
    for number in [n for n, group in kept.surplus.items() if not origin(tuple(group.versions))[0]]:
        _lose_surplus(state, number, "rolled_back")


def lose_stale(state: QueueState) -> None:
    """Surplus groups that no step which is still to be trained admits, or that come after the last one."""
    trained = state.progress.trained_steps
    for number, group in list(state.kept.surplus.items()):
        if trained >= state.plan.steps:
            _lose_surplus(state, number, "unwanted")
        elif state.lineage.origin(tuple(group.versions))[1] < trained - state.plan.max_staleness:
            _lose_surplus(state, number, "stale_version")
