"""Changes of logs: they grow, are used up or lost, and spares are given to tickets; see
`state.segments`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.segments import Growth, Log
from relax_hpc.queue.controller.topics import ADMISSION
from relax_hpc.queue.records import NO_STEP, Owner, Shard

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@applies("append")
def append(
    state: QueueState,
    key: str,
    owner: Owner,
    shard: dict,
    fields: list[str],
    growths: list[Growth],
    spare: bool,
    refused: dict[int, str],
) -> None:
    state.puts.remember(key, owner, refused)
    taken = [growth for growth in growths if growth[0] not in refused]
    if taken:
        number = state.shards.add(Shard(shard, tuple(fields), owner, (), len(taken), len(taken)))
    else:
        state.shards.garbage.append(shard["name"])
    for growth in growths:
        if growth[0] in refused:
            state.segments.refuse(growth, refused[growth[0]])
        elif (holder := state.segments.append(number, growth, spare)) < 0:
            state.media.hold(holder, state.media.of(growth[0]))
    state.events.tell("spared" if spare else "appended", [growth[0] for growth in taken])


@applies("drop_attempt")
def drop_attempt(
    state: QueueState, key: str, owner: Owner, ticket: int, spare: bool, reason: str
) -> None:
    state.puts.remember(key, owner, {})
    if spare:
        state.counts.dropped[reason] += len(state.plan.undeclared)
        state.events.tell("failed", [ticket], reason=reason)
    else:
        lose_log(state, ticket, reason)


@applies("bind")
def bind(state: QueueState, spares: Mapping[int, int]) -> None:
    """Bind tickets to the spares that they are made of from now on (ticket -> spare)."""
    for ticket, spare in spares.items():
        state.segments.logs[ticket] = state.segments.logs.pop(spare)
        last = state.last_step(state.segments.versions(ticket))
        state.groups[ticket].last = min(state.groups[ticket].last, last)
        state.media.hold(ticket, state.media.of(spare))
        state.media.release(spare)


def use_logs(state: QueueState, tickets: Iterable[int]) -> None:
    """Use up the logs of ``tickets``, whose rows are accepted."""
    for ticket in [ticket for ticket in tickets if ticket in state.segments.logs]:
        _leave_shards(state, state.segments.use(ticket))


def lose_log(state: QueueState, holder: int, reason: str) -> None:
    """Drop a holder's log: another attempt takes its place, or nobody may use it any more."""
    if holder not in state.segments.logs:
        return
    log = state.segments.lose(holder, reason)
    _leave_shards(state, log)
    state.events.tell("unappended", [log.ticket], reason=reason)
    if holder < 0:
        state.media.release(holder)
    elif holder in state.tickets.reissued:
        state.groups[holder].last = NO_STEP


def lose_rolled_back(state: QueueState) -> None:
    """Drop logs whose tokens were drawn with rolled-back weights, after the lineage changed."""
    for holder, log in list(state.segments.logs.items()):
        if not state.lineage.origin(tuple(log.versions))[0]:
            lose_log(state, holder, "rolled_back")


def lose_stale(state: QueueState) -> None:
    """Spares that no step which is still to be trained admits, or that come after the last one."""
    step = state.progress.furthest
    for spare in state.segments.spares:
        if step >= state.plan.steps:
            lose_log(state, spare, "unwanted")
        elif state.last_step(state.segments.versions(spare)) < step:
            lose_log(state, spare, "stale_version")


def _leave_shards(state: QueueState, log: Log) -> None:
    for number in log.shards:
        state.shards.drop(number, 1, 1)
    state.woken.add(ADMISSION)
