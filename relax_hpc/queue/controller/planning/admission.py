"""Rules for which tickets may start. Functions of the state alone."""

from __future__ import annotations

from relax_hpc.base.versions import Version
from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.planning.step_sets import Room
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.records import NO_STEP, Cause

_NEWER = "tickets: a newer version"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def admissible(state: QueueState, version: Version, count: int) -> list[int]:
    """Tickets that an engine serving ``version`` may start, up to ``count``, lowest first.

    What the queue may hold bounds them, except for those of the step that is trained next: it can
    always be finished.
    """
    if version not in state.lineage:
        return []
    plan = state.plan
    if state.progress.trained[POLICY] - version.number > plan.publish_lag:
        return []
    end = min(plan.steps, version.number + plan.max_staleness + 1) * plan.prompts_per_step
    full = state.shards.untrained_bytes >= plan.max_bytes
    room = (plan.max_rows - rows_to_train(state)) // plan.samples_per_prompt
    if state.tasks.in_sets:
        begun = (
            len(state.tickets.generating)
            - len(state.tickets.reissued)
            + len(state.tickets.untrained)
        )
        owed = max(0, plan.prompts_per_step - begun)
        again = _in_time(
            state, version, state.tickets.reissued.lowest(min(count, owed) if full else count, end)
        )
        end_of_fresh = state.tickets.next + max(0 if full else room, owed - len(again))
    else:
        due = (state.progress.trained_steps + 1) * plan.prompts_per_step
        end = min(end, due) if full else end
        again, end_of_fresh = (
            state.tickets.reissued.lowest(count, end),
            max(due, state.tickets.next + room),
        )
    return [
        *again,
        *range(state.tickets.next, min(end, end_of_fresh, state.tickets.next + count - len(again))),
    ]


def _in_time(state: QueueState, version: Version, tickets: list[int]) -> list[int]:
    """Tickets among ``tickets``, admitted before, whose tokens by ``version`` could still be
    trained on in time.

    Others may have taken their places since. Fresh tickets have theirs: those before them are not
    too many.
    """
    if not tickets or not state.tasks.in_sets:
        return tickets
    room, last = Room(state, len(tickets)), version.number + state.plan.max_staleness
    kept = {ticket: state.groups[ticket].last for ticket in tickets}
    return [
        ticket
        for ticket in tickets
        if NO_STEP < kept[ticket] <= last or room.moves(kept[ticket], last)
    ]


def why_not(state: QueueState, version: Version | None) -> tuple[str, bool, Cause]:
    """Reason why there is no ticket for an engine that serves ``version``, whether there is none
    for any other either, and the cause: it is the actor that publishes versions and empties the
    queue."""
    plan = state.plan
    if version is None or version not in state.lineage:
        return (
            "serves no version of this lineage yet",
            False,
            (POLICY, "tickets: a version to serve"),
        )
    step = plan.step_of(min([state.tickets.next, *state.tickets.reissued.lowest(1)]))
    if step >= plan.steps:
        return "all tickets are out", True, (POLICY, "tickets: all are out")
    if version.number < step - plan.max_staleness:
        newest = state.weights.newest.number if state.weights.newest else version.number
        needed = f"waits for version {step - plan.max_staleness}, newest is {newest}"
        return needed, False, (POLICY, _NEWER)
    if (lag := state.progress.trained[POLICY] - version.number) > plan.publish_lag:
        behind = (
            f"serves {version}, {lag} behind the newest, allowed "
            f"weights.publish_lag={plan.publish_lag}"
        )
        return behind, False, (POLICY, _NEWER)
    again = state.tickets.reissued.lowest(1)
    if again and not _in_time(state, version, again):
        return (
            f"serves {version}, too old for ticket {again[0]}, whose step is near",
            False,
            (POLICY, _NEWER),
        )
    full = (POLICY, "tickets: the queue is full")
    if state.shards.untrained_bytes >= plan.max_bytes:
        return (
            f"the queue holds {amounts(state.shards.untrained_bytes, plan.max_bytes)}",
            True,
            full,
        )
    return f"the queue holds or awaits {rows_to_train(state)} of {plan.max_rows} rows", True, full


def rows_to_train(state: QueueState) -> int:
    """Rows that wait for training or are in generation; a prompt group in generation counts one for
    each episode."""
    return state.tickets.untrained_rows + len(state.tickets.generating) * len(state.plan.undeclared)


def amounts(held: int, allowed: int) -> str:
    """Two numbers of bytes in the unit of the second.

    >>> amounts(3 << 29, 2 << 30)
    '1.5 of 2.0 GiB'
    """
    power = min((allowed.bit_length() - 1) // 10, len(_UNITS) - 1) if allowed else 0
    return f"{held / 1024**power:.1f} of {allowed / 1024**power:.1f} {_UNITS[power]}"
