"""Rules for the rows that may be put. All functions depend on the state only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.records import NO_STEP, Owner

PutGroup = tuple[int, bytes, bytes, Sequence[int]]
"""A prompt group of a put: ticket, rows of each episode (see `row_ids`), encoded lengths of the
rows (see `lengths`), encoded versions that made them."""


def find_refusals(
    state: QueueState, owner: Owner, groups: Iterable[PutGroup], lease: int
) -> dict[int, str]:
    """Prompt groups of a put that are refused, with the reason; 'duplicate' is harmless."""
    held = state.leases.get(lease) if lease else None
    leased = frozenset(held.tickets) if held and held.owner == owner else frozenset()
    refused: dict[int, str] = {}
    for ticket, episodes, _, codes in groups:
        is_in_lineage, oldest = state.lineage.origin(tuple(codes))
        if lease:
            reason = _refuse_fields(state, ticket, episodes, leased, is_in_lineage, oldest)
        else:
            reason = _refuse_rows(state, owner, ticket, episodes, is_in_lineage, oldest)
        if reason:
            refused[ticket] = reason
    return refused


def _refuse_rows(
    state: QueueState, owner: Owner, ticket: int, episodes: bytes, is_in_lineage: bool, oldest: int
) -> str:
    """Reason why generated rows are refused; empty: they are taken."""
    group = state.groups.get(ticket)
    if group is None:
        return "unknown_ticket"
    if group.present:
        return "duplicate"
    if group.owner != owner:
        return "not_owner"
    if len(episodes) != state.plan.samples_per_prompt or 0 in episodes:
        return "incomplete"
    if oldest < 0 or not is_in_lineage:
        return "rolled_back"
    # Step sets rely on the last step that was promised when the ticket was admitted.
    planned = group.last_step if state.tasks.in_sets else NO_STEP
    late = oldest + state.plan.max_staleness < max(state.plan.step_of(ticket), planned)
    return "stale_version" if late else ""


def _refuse_fields(
    state: QueueState,
    ticket: int,
    episodes: bytes,
    leased: frozenset[int],
    is_in_lineage: bool,
    oldest: int,
) -> str:
    """Reason why fields that a task adds are refused; empty: they are taken."""
    if ticket not in state.groups:
        return "unknown_ticket"
    if ticket not in leased:
        return "lease_lost"
    if episodes != state.groups[ticket].episodes:
        return "incomplete"
    if not is_in_lineage:
        return "rolled_back"
    on_policy = state.plan.max_staleness > 0 or oldest < 0 or oldest >= state.plan.step_of(ticket)
    return "" if on_policy else "stale_version"
