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
from relax_hpc.queue.controller.state.prompt_groups import drop, same_bytes, shared, withdraw
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
    """Fields of prompt groups, told as (ticket, lengths, versions, episodes), lie in a new shard;
    ``media``: of some of them the tokens of each row that stand for media."""
    tickets, bits = [row[0] for row in rows], state.bits.mask(fields)
    generated, scored, groups = bits & state.generated, bits & state.scored, state.groups
    if generated:
        state.tickets.store(tickets, sum(sum(episodes) for *_, episodes in rows))
    shard = Shard(descriptor, fields, owner, () if saved else tuple(tickets), len(tickets))
    shard.untrained = sum(map(state.tickets.untrained.__contains__, tickets))
    part = (state.shards.add(shard), fields)
    for ticket, lengths, versions, episodes in rows:
        group = groups[ticket]
        group.parts += (part,)
        group.present |= bits
        if generated:
            group.declare(
                lengths, same_bytes(episodes), shared(tuple(versions)), media.get(ticket, b"")
            )
            group.owner = None
            group.last = state.last_step(versions)
        if scored:
            group.old_version = versions[0]
    for task, queue in state.tasks.items():
        if queue.needs & bits:
            _offer(state, task, tickets, bits)
    if saved:
        _count(state, part, tickets)


def _offer(state: QueueState, task: str, tickets: Sequence[int], came: int) -> None:
    """Offer ``tickets``, to which fields came, to ``task``, which may have waited for them."""
    groups, needs = state.groups, state.tasks[task].needs
    if came & needs != needs:
        tickets = [ticket for ticket in tickets if groups[ticket].present & needs == needs]
    if tickets:
        state.tasks[task].offer(tickets)
    state.woken.add(rows_for(task))


@applies("saved")
def save(state: QueueState, shards: list[int]) -> None:
    for number in shards:
        part = (number, state.shards[number].fields)
        waited = state.shards.saved(number)
        _count(state, part, [ticket for ticket in waited if _lies_in(state, ticket, part)])


def _count(state: QueueState, part: ShardFields, tickets: Sequence[int]) -> None:
    """The fields of ``part`` are on disk, or as safe as was asked for: from now on they count."""
    state.woken.add(DISK)
    if state.bits.mask(part[1]) & state.generated:
        _accept(state, tickets)
    else:
        late = state.shards.unsaved
        _tell_given(
            state,
            part[1],
            [ticket for ticket in tickets if _accepted(state, ticket)] if late else tickets,
        )


def _accept(state: QueueState, tickets: Sequence[int]) -> None:
    groups = state.groups
    for versions, same in groupby(tickets, lambda ticket: groups[ticket].versions):
        accepted = list(same)
        state.counts.accepted += groups.rows_of(accepted)
        state.tell_rows("accepted", accepted, _oldest(versions))
    if state.segments.logs:
        use_logs(state, tickets)
    for ticket in [ticket for ticket in tickets if len(groups[ticket].parts) > 1]:
        for number, fields in groups[ticket].parts[1:]:
            if not state.shards[number].unsaved:
                _tell_given(state, fields, [ticket])


def _accepted(state: QueueState, ticket: int) -> bool:
    return not state.shards[state.groups[ticket].parts[0][0]].unsaved


@lru_cache(maxsize=4096)
def _oldest(codes: frozenset[int]) -> str:
    return str(min(Version.decode(code) for code in codes))


def _tell_given(state: QueueState, fields: tuple[str, ...], tickets: Sequence[int]) -> None:
    """A task has given ``fields``; where they are scores, by which version."""
    if not state.bits.mask(fields) & state.scored:
        state.events.tell(fields[0], tickets)
        return
    for version, scored in groupby(tickets, lambda ticket: state.groups[ticket].old_version):
        state.events.tell(fields[0], list(scored), str(Version.decode(version)))


def lose(state: QueueState, number: int) -> None:
    """Lose a shard that nobody can save any more: who made it is gone."""
    shard = state.shards[number]
    part, waited = (number, shard.fields), state.shards.saved(number)
    for ticket in [ticket for ticket in waited if _lies_in(state, ticket, part)]:
        if state.bits.mask(shard.fields) & state.generated:
            drop(state, ticket, "lost")
        else:
            withdraw(state, ticket, part)
            state.events.tell("lost", [ticket], reason=shard.fields[0])
    state.woken.add(DISK)


def _lies_in(state: QueueState, ticket: int, part: ShardFields) -> bool:
    return ticket in state.groups and part in state.groups[ticket].parts


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
    """All fields of these prompt groups lie in one file from now on, each as what was put together
    before."""
    held = {ticket: state.groups[ticket].parts for ticket in tickets}
    parts = [part for ticket in tickets for part in held[ticket]]
    fields = tuple(dict.fromkeys(field for _, some in parts for field in some))
    untrained = state.tickets.untrained
    shard = Shard(descriptor, fields, owner, (), len(parts))
    shard.untrained = sum(len(held[ticket]) for ticket in tickets if ticket in untrained)
    number, same_part = state.shards.add(shard), dict[tuple[str, ...], ShardFields]()
    for ticket in tickets:
        state.groups[ticket].parts = tuple(
            same_part.setdefault(some, (number, some)) for _, some in held[ticket]
        )
        for old, _ in held[ticket]:
            state.shards.drop(old, 1, int(ticket in untrained))
