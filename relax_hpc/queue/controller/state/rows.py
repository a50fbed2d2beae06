"""Records that put rows, save them, gather them into one file per step, and drop them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.leases import consume
from relax_hpc.queue.controller.state.prompt_groups import (
    drop,
    shared_bytes,
    shared_versions,
    withdraw,
)
from relax_hpc.queue.controller.state.segments import use_logs
from relax_hpc.queue.controller.topics import DISK, rows_for
from relax_hpc.queue.records import Owner, Shard, ShardFields

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState

REJECTED = ("rolled_back", "stale_version", "incomplete", "unknown_media")
"""Reasons why generated rows are dropped and their ticket is offered again."""


@applies("put")
def put(
    state: QueueState,
    key: str,
    owner: Owner,
    shard: dict,
    rows: list[list],
    fields: list[str],
    refused: dict[int, str],
    lease: int,
    saved: bool,
    media: Mapping[int, bytes] = MappingProxyType({}),
) -> None:
    state.puts.remember(key, owner, refused)
    if rows:
        _store(state, owner, shard, tuple(fields), rows, saved, media)
    else:
        state.shards.garbage.append(shard["name"])
    for ticket, reason in refused.items():
        if reason in REJECTED and "token_ids" in fields:
            drop(state, ticket, reason)
    if lease:
        consume(state, lease)


def _store(
    state: QueueState,
    owner: Owner,
    descriptor: dict,
    fields: tuple[str, ...],
    rows: Sequence[Sequence],
    saved: bool,
    media: Mapping[int, bytes],
) -> None:
    """Add a new shard with fields of prompt groups; ``rows``: (ticket, lengths, versions, episodes)
    of each. ``media``: encoded tokens of media, of those that have any."""
    tickets, bits = [row[0] for row in rows], state.bits.mask(fields)
    generated, scored, groups = bits & state.generated, bits & state.scored, state.groups
    if generated:
        state.tickets.store(tickets, sum(sum(episodes) for *_, episodes in rows))
    shard = Shard(descriptor, fields, owner, () if saved else tuple(tickets), len(tickets))
    shard.untrained = sum(map(state.tickets.untrained.__contains__, tickets))
    shard_fields = (state.shards.add(shard), fields)
    for ticket, lengths, versions, episodes in rows:
        group = groups[ticket]
        group.parts += (shard_fields,)
        group.present |= bits
        if generated:
            group.declare(
                lengths,
                shared_bytes(episodes),
                shared_versions(tuple(versions)),
                media.get(ticket, b""),
            )
            group.owner = None
            group.last_step = state.last_step(versions)
        if scored:
            group.old_version = versions[0]
    for task, queue in state.tasks.items():
        if queue.needs & bits:
            _offer(state, task, tickets, bits)
    if saved:
        _count_saved(state, shard_fields, tickets)


def _offer(state: QueueState, task: str, tickets: Sequence[int], added: int) -> None:
    """Offer ``tickets``, which got the fields ``added``, to ``task``, if it can take them now."""
    groups, needs = state.groups, state.tasks[task].needs
    if added & needs != needs:
        tickets = [ticket for ticket in tickets if groups[ticket].has(needs)]
    if tickets:
        state.tasks[task].offer(tickets)
    state.woken.add(rows_for(task))


@applies("saved")
def save(state: QueueState, shards: list[int]) -> None:
    for number in shards:
        shard_fields = (number, state.shards[number].fields)
        waiting = state.shards.mark_saved(number)
        _count_saved(
            state, shard_fields, [t for t in waiting if _is_in_shard(state, t, shard_fields)]
        )


def _count_saved(state: QueueState, shard_fields: ShardFields, tickets: Sequence[int]) -> None:
    """Count the fields of ``shard_fields``, which are as durable as configured, and add their
    events."""
    state.woken.add(DISK)
    if state.bits.mask(shard_fields[1]) & state.generated:
        _accept(state, tickets)
        return
    if state.shards.unsaved:
        # Fields of a row that is not accepted yet are counted when it is accepted.
        tickets = [ticket for ticket in tickets if _is_accepted(state, ticket)]
    _add_field_events(state, shard_fields[1], tickets)


def _accept(state: QueueState, tickets: Sequence[int]) -> None:
    groups = state.groups
    for versions, same in groupby(tickets, lambda ticket: groups[ticket].versions):
        accepted = list(same)
        state.counts.accepted += groups.rows_of(accepted)
        state.add_row_events("accepted", accepted, _oldest(versions))
    if state.segments.logs:
        use_logs(state, tickets)
    for ticket in tickets:
        for number, fields in groups[ticket].parts[1:]:
            if not state.shards[number].unsaved:
                _add_field_events(state, fields, [ticket])


def _is_accepted(state: QueueState, ticket: int) -> bool:
    return not state.shards[state.groups[ticket].parts[0][0]].unsaved


@lru_cache(maxsize=4096)
def _oldest(codes: frozenset[int]) -> str:
    return str(min(Version.decode(code) for code in codes))


def _add_field_events(state: QueueState, fields: tuple[str, ...], tickets: Sequence[int]) -> None:
    """Add events of tickets to which a task added ``fields``; for scores, with the version that
    computed them."""
    if not state.bits.mask(fields) & state.scored:
        state.events.add(fields[0], tickets)
        return
    for version, scored in groupby(tickets, lambda ticket: state.groups[ticket].old_version):
        state.events.add(fields[0], list(scored), str(Version.decode(version)))


def lose_shard(state: QueueState, number: int) -> None:
    """Drop the rows of a shard that was not saved before its producer ended."""
    shard = state.shards[number]
    shard_fields, waiting = (number, shard.fields), state.shards.mark_saved(number)
    for ticket in waiting:
        if not _is_in_shard(state, ticket, shard_fields):
            continue
        if state.bits.mask(shard.fields) & state.generated:
            drop(state, ticket, "lost")
        else:
            withdraw(state, ticket, shard_fields)
            state.events.add("lost", [ticket], reason=shard.fields[0])
    state.woken.add(DISK)


def _is_in_shard(state: QueueState, ticket: int, shard_fields: ShardFields) -> bool:
    return ticket in state.groups and shard_fields in state.groups[ticket].parts


@applies("quarantine")
def quarantine(state: QueueState, tickets: list[int], reason: str) -> None:
    for ticket in tickets:
        drop(state, ticket, reason)
        state.groups[ticket].attempt += 1


@applies("gathered")
def gather(state: QueueState, owner: Owner, end: int, files: list) -> None:
    for descriptor, tickets in files:
        _gather_into(state, owner, descriptor, tickets)
    state.progress.gathered = max(state.progress.gathered, end)


def _gather_into(state: QueueState, owner: Owner, descriptor: dict, tickets: Sequence[int]) -> None:
    """Move all fields of these prompt groups to one file. Fields that were put together stay
    together."""
    old_parts = {ticket: state.groups[ticket].parts for ticket in tickets}
    fields: dict[str, None] = {}
    count = untrained_count = 0
    untrained = state.tickets.untrained
    for ticket in tickets:
        count += len(old_parts[ticket])
        untrained_count += len(old_parts[ticket]) if ticket in untrained else 0
        for _, names in old_parts[ticket]:
            fields |= dict.fromkeys(names)
    shard = Shard(descriptor, tuple(fields), owner, (), count, untrained_count)
    number, shared_parts = state.shards.add(shard), dict[tuple[str, ...], ShardFields]()
    for ticket in tickets:
        state.groups[ticket].parts = tuple(
            shared_parts.setdefault(names, (number, names)) for _, names in old_parts[ticket]
        )
        for old, _ in old_parts[ticket]:
            state.shards.drop(old, 1, int(ticket in untrained))
