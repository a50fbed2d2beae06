"""Rules for which logs of attempts may grow, and which tickets are made of spares. Functions of the
state alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from relax_hpc.queue.controller.planning.admission import rows_to_train
from relax_hpc.queue.controller.planning.step_sets import Room
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.state.segments import Growth, Log
from relax_hpc.queue.records import NO_STEP, Owner


def refusal(state: QueueState, owner: Owner, growth: Growth, spare: bool) -> str:
    """Reason why a log may not grow so; empty: it may."""
    ticket, attempt, segments, versions = growth
    group, log = state.groups.get(ticket), Log(ticket, attempt)
    if spare:
        why, step = _no_spare(state, growth), state.progress.furthest
    elif group and (group.owner, group.attempt) == (owner, attempt):
        log = state.segments.logs.get(ticket, log)
        why = "" if (log.ticket, log.attempt) == (ticket, attempt) else "duplicate"
        # Not older than what was promised when the ticket was admitted: its step may be planned.
        step = max(state.plan.step_of(ticket), group.last if state.tasks.in_sets else NO_STEP)
    else:
        return "not_owner"
    if why or not log.fits(segments):
        return why or "gap"
    survive, oldest = state.lineage.origin(tuple(log.versions.union(versions)))
    if not survive:
        return "rolled_back"
    # Tokens that nobody sampled are of no version.
    return "stale_version" if 0 <= oldest < step - state.plan.max_staleness else ""


def _no_spare(state: QueueState, growth: Growth) -> str:
    """Reason why an attempt cannot be kept as a spare; empty: it is whole, and there is room."""
    plan, held = state.plan, state.segments
    if (
        len({episode for episode, *_, ended in growth[2] if ended}) < plan.samples_per_prompt
        or not growth[3]
    ):
        return "incomplete"
    if state.progress.furthest >= plan.steps:
        return "unwanted"
    if any((log.ticket, log.attempt) == (growth[0], growth[1]) for log in held.logs.values()):
        return "duplicate"
    rows = rows_to_train(state) + (len(held.spares) + 1) * len(plan.undeclared)
    full = state.shards.untrained_bytes >= plan.max_bytes or rows > plan.max_rows
    return "no_room" if full else ""


def spares_for(state: QueueState, tickets: Iterable[int], version: int) -> dict[int, int]:
    """Spare for each of ``tickets`` that is made of one instead of by version number ``version`` or
    later: the oldest that its step admits."""
    given: dict[int, int] = {}
    if not (spares := state.segments.spares):
        return given
    tickets = list(tickets)
    room, latest = Room(state, len(tickets)), version + state.plan.max_staleness
    for ticket in tickets:
        fits = (
            spare
            for spare in spares
            if (last := state.last_step(state.segments.versions(spare)))
            >= state.plan.step_of(ticket)
            if not state.tasks.in_sets or last >= latest or room.moves(latest, last)
        )
        if ticket not in state.segments.logs and (spare := next(fits, None)) is not None:
            given[ticket] = spare
            spares.remove(spare)
    return given


def logs_of(state: QueueState, tickets: Iterable[int]) -> dict[str, Any]:
    """Logs of ``tickets``: `logs`, with whose attempt each is and the numbers of its shards in the
    order of the segments, and `shards` by number, of which many logs have the same."""
    held = [(ticket, log) for ticket in tickets if (log := state.segments.logs.get(ticket))]
    return {
        "logs": [
            {"holder": t, "ticket": v.ticket, "attempt": v.attempt, "shards": v.shards}
            for t, v in held
        ],
        "shards": {
            number: state.shards[number].descriptor for _, log in held for number in log.shards
        },
    }
