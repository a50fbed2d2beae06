"""What is allowed: which tickets may start, and which rows may be put. Functions of the state alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relax_hpc.transfer_queue.controller.state import QueueState
from relax_hpc.transfer_queue.controller.step_sets import Room
from relax_hpc.transfer_queue.records import NO_STEP, Cause, Owner
from relax_hpc.versions import Version

Row = tuple[int, int, bytes, Sequence[int]]
"""Ticket, bit mask of the samples, their lengths (`packed` tokens), `Version.encode` of the versions that made it."""
_NEWER = "tickets: a newer version"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def admissible(state: QueueState, version: Version, count: int) -> list[int]:
    """Up to ``count`` tickets that an engine serving ``version`` may start, lowest first.

    What the queue may hold bounds them, except for those of the step that is trained next: it can always be finished.
    """
    if not state.in_lineage(version):
        return []
    plan = state.plan
    if state.trained_steps - version.number > plan.publish_lag:
        return []
    end = min(plan.steps, version.number + plan.max_staleness + 1) * plan.prompts_per_step
    full = state.shelf.untrained_bytes >= plan.max_bytes
    room = plan.max_rows // plan.samples_per_prompt - len(state.generating) - len(state.untrained)
    if state.in_sets:
        begun = len(state.generating) - len(state.reissued) + len(state.untrained)
        owed = max(0, plan.prompts_per_step - begun)
        again = _in_time(state, version, state.reissued.lowest(min(count, owed) if full else count, end))
        end_of_fresh = state.next_ticket + max(0 if full else room, owed - len(again))
    else:
        due = (state.trained_steps + 1) * plan.prompts_per_step
        end = min(end, due) if full else end
        again, end_of_fresh = state.reissued.lowest(count, end), max(due, state.next_ticket + room)
    return [*again, *range(state.next_ticket, min(end, end_of_fresh, state.next_ticket + count - len(again)))]


def _in_time(state: QueueState, version: Version, tickets: list[int]) -> list[int]:
    """Of tickets that were admitted before those whose tokens by ``version`` could still be trained on in time.

    Others may have taken their places since. Fresh tickets have theirs: those before them are not too many.
    """
    if not tickets or not state.in_sets:
        return tickets
    room, last = Room(state), version.number + state.plan.max_staleness
    kept = {ticket: state.groups[ticket].last for ticket in tickets}
    return [ticket for ticket in tickets if NO_STEP < kept[ticket] <= last or room.moves(kept[ticket], last)]


def why_not(state: QueueState, version: Version | None) -> tuple[str, bool, Cause]:
    """Why there is no ticket for an engine that serves ``version``, whether there is none for any other either, and
    its cause: it is the actor that publishes versions and empties the queue."""
    plan = state.plan
    if version is None or not state.in_lineage(version):
        return "serves no version of this lineage yet", False, ("actor", "tickets: a version to serve")
    step = plan.step_of(min([state.next_ticket, *state.reissued.lowest(1)]))
    if step >= plan.steps:
        return "all tickets are out", True, ("actor", "tickets: all are out")
    if version.number < step - plan.max_staleness:
        newest = state.newest.number if state.newest else version.number
        needed = f"waits for version {step - plan.max_staleness}, newest is {newest}"
        return needed, False, ("actor", _NEWER)
    if (lag := state.trained_steps - version.number) > plan.publish_lag:
        behind = f"serves {version}, {lag} behind the newest, allowed weights.publish_lag={plan.publish_lag}"
        return behind, False, ("actor", _NEWER)
    again = state.reissued.lowest(1)
    if again and not _in_time(state, version, again):
        return f"serves {version}, too old for ticket {again[0]}, whose step is near", False, ("actor", _NEWER)
    full = ("actor", "tickets: the queue is full")
    if state.shelf.untrained_bytes >= plan.max_bytes:
        return f"the queue holds {amounts(state.shelf.untrained_bytes, plan.max_bytes)}", True, full
    rows = (len(state.generating) + len(state.untrained)) * plan.samples_per_prompt
    return f"the queue holds or awaits {rows} of {plan.max_rows} rows", True, full


def amounts(held: int, allowed: int) -> str:
    """Both numbers of bytes in the unit of the second.

    >>> amounts(3 << 29, 2 << 30)
    '1.5 of 2.0 GiB'
    """
    power = min((allowed.bit_length() - 1) // 10, len(_UNITS) - 1) if allowed else 0
    return f"{held / 1024**power:.1f} of {allowed / 1024**power:.1f} {_UNITS[power]}"


def refusals(state: QueueState, owner: Owner, rows: Iterable[Row], lease: int) -> dict[int, str]:
    """Of the prompt groups of a put those that cannot be taken, with the reason; 'duplicate' is harmless."""
    held = state.leases.get(lease) if lease else None
    mine = frozenset(held.tickets) if held and held.owner == owner else frozenset()
    judge = _refuse_fields if lease else _refuse_rows
    refused: dict[int, str] = {}
    for ticket, mask, _, codes in rows:
        if reason := judge(state, owner, ticket, mask, mine, *state.origin(tuple(codes))):
            refused[ticket] = reason
    return refused


def _refuse_rows(
    state: QueueState, owner: Owner, ticket: int, mask: int, _: frozenset[int], survive: bool, oldest: int
) -> str:
    """Freshly generated ones."""
    group = state.groups.get(ticket)
    if group is None:
        return "unknown_ticket"
    if group.present:
        return "duplicate"
    if group.owner != owner:
        return "not_owner"
    if mask != state.full:
        return "incomplete"
    if oldest < 0 or not survive:
        return "rolled_back"
    # Not older than what was promised when the ticket was admitted: its step may be planned.
    planned = group.last if state.in_sets else NO_STEP
    late = oldest + state.plan.max_staleness < max(state.plan.step_of(ticket), planned)
    return "stale_version" if late else ""


def _refuse_fields(
    state: QueueState, owner: Owner, ticket: int, mask: int, mine: frozenset[int], survive: bool, oldest: int
) -> str:
    """What a task adds to the tickets that it holds."""
    if ticket not in state.groups:
        return "unknown_ticket"
    if ticket not in mine:
        return "lease_lost"
    if mask != state.full:
        return "incomplete"
    if not survive:
        return "rolled_back"
    on_policy = state.plan.max_staleness > 0 or oldest < 0 or oldest >= state.plan.step_of(ticket)
    return "" if on_policy else "stale_version"
