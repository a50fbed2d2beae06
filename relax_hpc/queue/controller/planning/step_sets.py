"""Sets of prompt groups that steps train, at staleness above 0: ready ones, but never so that
another comes too late.

A prompt group has a last step: the oldest version of its tokens + max_staleness. A step takes those
whose last step has come, then ready ones by nearest last step, then by ticket, and only if for
every later step u the admitted groups left with a last step <= u are no more than the places of the
steps until u; else it waits for a straggler. Groups are taken by windows, as soon as there is one
that leaves a place in time for each of the others. Functions of the state alone.

That works out because nobody starts a ticket that would find no place in time (`Room.moves`), and
rows that took no longer than promised never come later: whoever takes the nearest last steps first
keeps all of them, if anybody can. Source: Jackson 1955, "Scheduling a production line to minimize
maximum tardiness" (earliest due date first).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, islice, takewhile
from typing import TYPE_CHECKING

from relax_hpc.queue.controller.planning.windows import Budget
from relax_hpc.queue.controller.state.task_queues import HELD, READY
from relax_hpc.queue.records import NO_STEP

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState

_AHEAD = 2
"""Steps beyond max_staleness that a last step can be away: versions are published before their step
is journaled."""


class Room:
    """Free places by step: for each step u from the next on, the places of the steps until u less
    the groups left that must be in them.

    It is never below 0.
    """

    def __init__(self, state: QueueState, coming: int = 0) -> None:
        """``coming``: how many prompt groups may be moved that are not in ``state`` yet."""
        # All places of what any trainer has trained are taken.
        self.first, size, order = (
            state.progress.furthest,
            state.plan.prompts_per_step,
            state.order.tickets,
        )
        left = coming + len(state.tickets.generating) + len(state.tickets.untrained)
        left += max(0, len(order) - self.first * size)
        # Later steps than all that are left could fill have room, however large max_staleness is.
        self._steps, groups = min(state.plan.max_staleness, left // size) + _AHEAD, state.groups
        needed = [0] * self._steps
        for ticket in chain(state.tickets.generating, state.tickets.untrained):
            group = groups[ticket]
            if group.last != NO_STEP and group.position == NO_STEP:
                needed[self._number(group.last)] += 1
        for place in range(self.first * size, len(order)):
            if order[place] != NO_STEP:
                needed[self._number(place // size)] += 1
        self.free = [size * (number + 1) - used for number, used in enumerate(accumulate(needed))]

    def _number(self, step: int) -> int:
        return min(max(0, step - self.first), self._steps - 1)

    def moves(self, before: int, last: int) -> bool:
        """Whether a group can have ``last`` for its last step instead of ``before`` (NO_STEP:
        none); it has it then."""
        start, end = self._number(last), self._steps if before == NO_STEP else self._number(before)
        if fits := last >= self.first and all(
            self.free[number] > 0 for number in range(start, end)
        ):
            for number in range(start, end):
                self.free[number] -= 1
        return fits

    def takes(self, lasts: Iterable[int], step: int) -> bool:
        """Whether groups with these last steps can all have places of ``step``."""
        change = [0] * (self._steps + 1)
        for last in lasts:
            change[self._number(last)] += 1
            change[self._number(step)] -= 1
        return all(
            free + moved >= 0 for free, moved in zip(self.free, accumulate(change), strict=False)
        )


def next_window(
    state: QueueState, task: str, budget: int, boundary: int
) -> tuple[tuple[int, ...], bool]:
    """The tickets of the next window, ascending, and whether it is stragglers alone that are waited
    for if there are none. It is known to be complete: another group would not fit, or the places
    until ``boundary`` are taken.

    What other trainers have taken comes first: all train the same.
    """
    room = Budget(budget, state.plan.samples_per_prompt)
    if len(state.plan.trainers) > 1 and (others := _of_others(state, task, boundary)):
        return _in_reach(state, task, others, room), False
    places, queue, groups = free_places(state, task, boundary), state.tasks[task], state.groups
    if not places or queue.statuses.count(READY) == 0:
        return (), False
    ready = queue.statuses.each(READY, queue.lowest_ready(), queue.statuses.end)
    nearest = sorted((groups[ticket].last, ticket) for ticket in ready)
    taken = []
    for last, ticket in islice(nearest, len(places)):
        if not room.takes(groups[ticket]):
            break
        taken.append((last, ticket))
    else:
        if len(taken) < len(places) and not room.full:
            return (), False
    step = places[0] // state.plan.prompts_per_step
    if not Room(state).takes((last for last, _ in taken), step):
        return (), True
    return tuple(sorted(ticket for _, ticket in taken)), False


def _of_others(state: QueueState, task: str, boundary: int) -> Sequence[int]:
    """Tickets whose places another trainer took and ``task`` did not yet, up to a multiple of
    ``boundary``."""
    order, statuses = state.order.tickets, state.tasks[task].statuses
    places = range(state.progress.trained[task] * state.plan.prompts_per_step, len(order))
    left = [place for place in places if order[place] == NO_STEP or statuses[order[place]] < HELD]
    end = (left[0] // boundary + 1) * boundary if left else 0
    return [order[place] for place in left if place < end and order[place] != NO_STEP]


def _in_reach(
    state: QueueState, task: str, tickets: Sequence[int], room: Budget
) -> tuple[int, ...]:
    """First ones of ``tickets`` that fit ``room``, ascending; none if one of them is not ready."""
    fitting = list(takewhile(lambda ticket: room.takes(state.groups[ticket]), tickets))
    ready = all(state.tasks[task].statuses[ticket] == READY for ticket in fitting)
    return tuple(sorted(fitting)) if ready else ()


def free_places(state: QueueState, task: str, boundary: int) -> Sequence[int]:
    """The first free place in the order of training, and those behind it up to a multiple of
    ``boundary``."""
    order, start = state.order.tickets, state.progress.trained[task] * state.plan.prompts_per_step
    first = next(
        (place for place in range(start, len(order)) if order[place] == NO_STEP),
        max(start, len(order)),
    )
    if first >= state.plan.steps * state.plan.prompts_per_step:
        return ()
    end = (first // boundary + 1) * boundary
    return [place for place in range(first, end) if place >= len(order) or order[place] == NO_STEP]


def straggler(state: QueueState, task: str) -> int:
    """Ticket with the nearest last step of the groups left that ``task`` cannot take yet, or
    NO_STEP."""
    statuses, groups = state.tasks[task].statuses, state.groups
    left = (
        (groups[ticket].last, ticket)
        for ticket in chain(state.tickets.generating, state.tickets.untrained)
    )
    late = [found for found in left if found[0] != NO_STEP and statuses[found[1]] < READY]
    return min(late)[1] if late else NO_STEP
