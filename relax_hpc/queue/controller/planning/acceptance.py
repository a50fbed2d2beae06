"""Rules for which rows may be put. Functions of the state alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.records import NO_STEP, Owner

Row = tuple[int, bytes, bytes, Sequence[int]]
"""Ticket, rows of each episode (see `row_ids`), their lengths (`packed` tokens), `Version.encode`
of the versions that made it."""


def refusals(state: QueueState, owner: Owner, rows: Iterable[Row], lease: int) -> dict[int, str]:
    """Prompt groups of a put that cannot be taken, with the reason; 'duplicate' is harmless."""
    held = state.leases.get(lease) if lease else None
    mine = frozenset(held.tickets) if held and held.owner == owner else frozenset()
    judge = _refuse_fields if lease else _refuse_rows
    refused: dict[int, str] = {}
    for ticket, episodes, _, codes in rows:
        if reason := judge(
            state, owner, ticket, episodes, mine, *state.lineage.origin(tuple(codes))
        ):
            refused[ticket] = reason
    return refused


def _refuse_rows(
    state: QueueState,
    owner: Owner,
    ticket: int,
    episodes: bytes,
    _: frozenset[int],
    survive: bool,
    oldest: int,
) -> str:
    """Reason why freshly generated rows are refused; empty: they are not."""
    group = state.groups.get(ticket)
    if group is None:
        return "unknown_ticket"
    if group.present:
        return "duplicate"
    if group.owner != owner:
        return "not_owner"
    if len(episodes) != state.plan.samples_per_prompt or 0 in episodes:
        return "incomplete"
    if oldest < 0 or not survive:
        return "rolled_back"
    # Not older than what was promised when the ticket was admitted: its step may be planned.
    planned = group.last if state.tasks.in_sets else NO_STEP
    late = oldest + state.plan.max_staleness < max(state.plan.step_of(ticket), planned)
    return "stale_version" if late else ""


def _refuse_fields(
    state: QueueState,
    owner: Owner,
    ticket: int,
    episodes: bytes,
    mine: frozenset[int],
    survive: bool,
    oldest: int,
) -> str:
    """Reason why fields that a task adds to tickets are refused; empty: they are not."""
    if ticket not in state.groups:
        return "unknown_ticket"
    if ticket not in mine:
        return "lease_lost"
    if episodes != state.groups[ticket].episodes:
        return "incomplete"
    if not survive:
        return "rolled_back"
    on_policy = state.plan.max_staleness > 0 or oldest < 0 or oldest >= state.plan.step_of(ticket)
    return "" if on_policy else "stale_version"
