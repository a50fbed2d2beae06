"""Sets of prompt groups that steps train, at staleness above 0: ready groups, chosen so that no
other group becomes too late.

A prompt group has a last step: the oldest version of its tokens + max_staleness. A step takes the
groups whose last step has come, then ready ones by nearest last step, then by ticket. It takes them
only if for every later step u the remaining admitted groups with a last step <= u are no more than
the positions of the steps until u. Otherwise it waits for a straggler. Groups are taken in windows,
as soon as a window leaves a position in time for each of the others. All functions depend on the
state only.

This always succeeds, because a ticket is only admitted if it has a position in time
(`FreePositions.move`), and rows do not have an earlier last step than was promised then. Taking the
nearest last steps first meets all of them, if any order does. Source: Jackson 1955, "Scheduling a
production line to minimize maximum tardiness" (earliest due date first).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, islice, takewhile
from typing import TYPE_CHECKING

from relax_hpc.queue.controller.planning.windows import WindowBudget
from relax_hpc.queue.controller.state.task_queues import HELD, READY
from relax_hpc.queue.records import NO_STEP

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState

_AHEAD = 2
"""Most steps by which a last step can exceed max_staleness: versions are published before their
step is journaled."""


class FreePositions:
    """Free positions by step: for each step u from the next one on, the positions of the steps
    until u, minus the remaining groups that must be in them.

    The numbers are never below 0.
    """

    def __init__(self, state: QueueState, coming: int = 0) -> None:
        """``coming``: number of prompt groups that are not in ``state`` yet, but may be moved."""
        # All positions of steps that any trainer has trained are taken.
        self.first, size = state.progress.furthest, state.plan.prompts_per_step
        order, groups = state.order.tickets, state.groups
        remaining = coming + len(state.tickets.generating) + len(state.tickets.untrained)
        remaining += max(0, len(order) - self.first * size)
        # The remaining groups cannot fill more steps than this, however large max_staleness is.
        self._steps = min(state.plan.max_staleness, remaining // size) + _AHEAD
        needed = [0] * self._steps
        for ticket in chain(state.tickets.generating, state.tickets.untrained):
            group = groups[ticket]
            if group.last_step != NO_STEP and group.position == NO_STEP:
                needed[self._index(group.last_step)] += 1
        for position in range(self.first * size, len(order)):
            if order[position] != NO_STEP:
                needed[self._index(position // size)] += 1
        self.free = [size * (index + 1) - used for index, used in enumerate(accumulate(needed))]

    def _index(self, step: int) -> int:
        return min(max(0, step - self.first), self._steps - 1)

    def move(self, before: int, last: int) -> bool:
        """Reserve a position until step ``last`` for a group that had one until step ``before``
        (NO_STEP: it had none). Return whether one is free. If not, nothing changes."""
        start = self._index(last)
        end = self._steps if before == NO_STEP else self._index(before)
        fits = last >= self.first and all(self.free[index] > 0 for index in range(start, end))
        if fits:
            for index in range(start, end):
                self.free[index] -= 1
        return fits

    def fit(self, lasts: Iterable[int], step: int) -> bool:
        """Whether groups with these last steps can all have positions of ``step``."""
        change = [0] * (self._steps + 1)
        for last in lasts:
            change[self._index(last)] += 1
            change[self._index(step)] -= 1
        pairs = zip(self.free, accumulate(change), strict=False)
        return all(free + moved >= 0 for free, moved in pairs)


def next_window(
    state: QueueState, task: str, budget: int, boundary: int
) -> tuple[tuple[int, ...], bool]:
    """The tickets of the next window, ascending; empty if no window is complete. Also whether the
    step waits only for stragglers. A window is complete if the next group would not fit, or if the
    positions until ``boundary`` are taken.

    Tickets that other trainers have taken come first, because all trainers train the same.
    """
    window_budget = WindowBudget(budget, state.plan.samples_per_prompt)
    if len(state.plan.trainers) > 1:
        taken_by_others = _taken_by_others(state, task, boundary)
        if taken_by_others:
            return _fitting_ready(state, task, taken_by_others, window_budget), False
    positions, queue, groups = (
        free_positions(state, task, boundary),
        state.tasks[task],
        state.groups,
    )
    if not positions or queue.statuses.count(READY) == 0:
        return (), False
    ready = queue.statuses.each(READY, queue.lowest_ready(), queue.statuses.end)
    nearest = sorted((groups[ticket].last_step, ticket) for ticket in ready)
    taken = []
    for last, ticket in islice(nearest, len(positions)):
        if not window_budget.add(groups[ticket]):
            break
        taken.append((last, ticket))
    else:
        if len(taken) < len(positions) and not window_budget.full:
            return (), False
    step = positions[0] // state.plan.prompts_per_step
    if not FreePositions(state).fit((last for last, _ in taken), step):
        return (), True
    return tuple(sorted(ticket for _, ticket in taken)), False


def _taken_by_others(state: QueueState, task: str, boundary: int) -> Sequence[int]:
    """Tickets whose positions another trainer has taken and ``task`` has not yet, up to a multiple
    of ``boundary``."""
    order, statuses = state.order.tickets, state.tasks[task].statuses
    start = state.progress.trained[task] * state.plan.prompts_per_step
    remaining = [
        position
        for position in range(start, len(order))
        if order[position] == NO_STEP or statuses[order[position]] < HELD
    ]
    end = (remaining[0] // boundary + 1) * boundary if remaining else 0
    tickets = [order[position] for position in remaining if position < end]
    return [ticket for ticket in tickets if ticket != NO_STEP]


def _fitting_ready(
    state: QueueState, task: str, tickets: Sequence[int], budget: WindowBudget
) -> tuple[int, ...]:
    """The first of ``tickets`` that fit ``budget``, ascending; empty if one of them is not
    ready."""
    fitting = list(takewhile(lambda ticket: budget.add(state.groups[ticket]), tickets))
    ready = all(state.tasks[task].statuses[ticket] == READY for ticket in fitting)
    return tuple(sorted(fitting)) if ready else ()


def free_positions(state: QueueState, task: str, boundary: int) -> Sequence[int]:
    """The first free position in the order of training, and later ones up to a multiple of
    ``boundary``."""
    order, start = state.order.tickets, state.progress.trained[task] * state.plan.prompts_per_step
    free = (position for position in range(start, len(order)) if order[position] == NO_STEP)
    first = next(free, max(start, len(order)))
    if first >= state.plan.steps * state.plan.prompts_per_step:
        return ()
    end = (first // boundary + 1) * boundary
    return [
        position
        for position in range(first, end)
        if position >= len(order) or order[position] == NO_STEP
    ]


def straggler(state: QueueState, task: str) -> int:
    """Of the remaining groups that ``task`` cannot take yet, the ticket with the nearest last step,
    or NO_STEP."""
    statuses, groups = state.tasks[task].statuses, state.groups
    late = []
    for ticket in chain(state.tickets.generating, state.tickets.untrained):
        last = groups[ticket].last_step
        if last != NO_STEP and statuses[ticket] < READY:
            late.append((last, ticket))
    return min(late)[1] if late else NO_STEP
