"""Rules for the tickets that may be admitted. All functions depend on the state only."""

from __future__ import annotations

from relax_hpc.base.versions import Version
from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.planning.step_sets import FreePositions
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.records import NO_STEP, Cause

_NEWER = "tickets: a newer version"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def admissible(state: QueueState, version: Version, count: int) -> list[int]:
    """Tickets that an engine with ``version`` may generate, up to ``count``, lowest first.

    The limits of the queue's content do not apply to tickets of the step that is trained next, so
    that this step can always be finished.
    """
    plan = state.plan
    lag = state.progress.trained[POLICY] - version.number
    if version not in state.lineage or lag > plan.publish_lag:
        return []
    end = min(plan.steps, version.number + plan.max_staleness + 1) * plan.prompts_per_step
    full = state.shards.untrained_bytes >= plan.max_bytes
    free_groups = (plan.max_rows - rows_to_train(state)) // plan.samples_per_prompt
    tickets = state.tickets
    if state.tasks.in_sets:
        begun = len(tickets.generating) - len(tickets.reissued) + len(tickets.untrained)
        missing_groups = max(0, plan.prompts_per_step - begun)
        candidates = tickets.reissued.lowest(min(count, missing_groups) if full else count, end)
        reissued = _still_trainable(state, version, candidates)
        end_of_new = tickets.next + max(0 if full else free_groups, missing_groups - len(reissued))
    else:
        due = (state.progress.trained_steps + 1) * plan.prompts_per_step
        end = min(end, due) if full else end
        reissued = tickets.reissued.lowest(count, end)
        end_of_new = max(due, tickets.next + free_groups)
    new = range(tickets.next, min(end, end_of_new, tickets.next + count - len(reissued)))
    return [*reissued, *new]


def _still_trainable(state: QueueState, version: Version, tickets: list[int]) -> list[int]:
    """The ``tickets``, admitted before, whose tokens of ``version`` can still be trained.

    Other tickets may now fill the steps in which these could be trained. New tickets need no check,
    because the number of tickets before them is limited.
    """
    if not tickets or not state.tasks.in_sets:
        return tickets
    positions, last = FreePositions(state, len(tickets)), version.number + state.plan.max_staleness
    trainable = []
    for ticket in tickets:
        log_last = state.groups[ticket].last_step
        if NO_STEP < log_last <= last or positions.move(log_last, last):
            trainable.append(ticket)
    return trainable


def explain_wait(state: QueueState, version: Version | None) -> tuple[str, bool, Cause]:
    """Reason why no ticket is admissible for an engine with ``version``; whether this holds for all
    engines; and the component that is waited for, here always the actor."""
    plan = state.plan
    if version is None or version not in state.lineage:
        cause = POLICY, "tickets: a version to serve"
        return "serves no version of this lineage yet", False, cause
    step = plan.step_of(min([state.tickets.next, *state.tickets.reissued.lowest(1)]))
    if step >= plan.steps:
        return "all tickets of the run are assigned", True, (POLICY, "tickets: all are out")
    too_old = _explain_version(state, version, step)
    if too_old:
        return too_old, False, (POLICY, _NEWER)
    cause = POLICY, "tickets: the queue is full"
    if state.shards.untrained_bytes >= plan.max_bytes:
        amounts = format_amounts(state.shards.untrained_bytes, plan.max_bytes)
        return f"the queue holds {amounts}", True, cause
    return f"the queue holds or awaits {rows_to_train(state)} of {plan.max_rows} rows", True, cause


def _explain_version(state: QueueState, version: Version, step: int) -> str:
    """Reason why ``version`` is too old for the next ticket, which is admitted for ``step``.

    Empty if it is not too old.
    """
    plan = state.plan
    if version.number < step - plan.max_staleness:
        newest = state.weights.newest.number if state.weights.newest else version.number
        return f"waits for version {step - plan.max_staleness}, newest is {newest}"
    lag = state.progress.trained[POLICY] - version.number
    if lag > plan.publish_lag:
        allowed = f"allowed weights.publish_lag={plan.publish_lag}"
        return f"serves {version}, {lag} behind the newest, {allowed}"
    reissued = state.tickets.reissued.lowest(1)
    if reissued and not _still_trainable(state, version, reissued):
        return f"serves {version}, too old for ticket {reissued[0]}, whose step is near"
    return ""


def rows_to_train(state: QueueState) -> int:
    """Rows that wait for training or are in generation. A prompt group in generation counts as one
    row for each episode."""
    return state.tickets.untrained_rows + len(state.tickets.generating) * len(state.plan.undeclared)


def format_amounts(held: int, allowed: int) -> str:
    """Two numbers of bytes in the unit of the second.

    >>> format_amounts(3 << 29, 2 << 30)
    '1.5 of 2.0 GiB'
    """
    power = min((allowed.bit_length() - 1) // 10, len(_UNITS) - 1) if allowed else 0
    return f"{held / 1024**power:.1f} of {allowed / 1024**power:.1f} {_UNITS[power]}"
