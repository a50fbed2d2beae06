"""Cutting the prompt groups of a task into windows, which become micro-batches. Functions of the
state alone."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from relax_hpc.queue.controller.state.task_queues import HELD, READY, WAITING
from relax_hpc.queue.records import PromptGroup

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


class Budget:
    """Room left in a window: the tokens of all its rows fit ``budget``."""

    def __init__(self, budget: int, episodes: int) -> None:
        """``episodes``: number of them in a prompt group, each of a row at least."""
        self.budget, self.episodes = budget, episodes
        self.groups = self.tokens = 0

    def takes(self, group: PromptGroup) -> bool:
        """Whether ``group``, which is counted in, fits; the first one always does."""
        self.groups += 1
        self.tokens += sum(group.row_tokens)
        return self.groups == 1 or self.tokens <= self.budget

    @property
    def full(self) -> bool:
        """Whether no other group would fit, whatever its lengths are: then nobody has to wait to
        see them."""
        return self.groups > 0 and self.tokens + self.episodes > self.budget


def in_order(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """The next window in ticket order, known to be complete; empty while it is not, or not all of
    it is ready.

    What it holds depends on the groups' lengths alone, never on when they arrived.
    """
    queue, room = state.tasks[task], Budget(budget, state.plan.samples_per_prompt)
    start = queue.position
    held = {ticket for window in queue.returned for ticket in window}
    window: list[int] = []
    for ticket in range(start, (start // boundary + 1) * boundary):
        status = queue.statuses[ticket]
        if status >= HELD or ticket in held:
            continue
        if room.full:
            break
        group = state.groups.get(ticket)
        if group is None or not group.present & state.generated:
            return ()
        if not room.takes(group):
            break
        if status != READY:
            return ()
        window.append(ticket)
    return tuple(window)


def as_ready(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """Lowest ready tickets, as many as fit."""
    queue, room = state.tasks[task], Budget(budget, state.plan.samples_per_prompt)
    window: list[int] = []
    first = queue.lowest_ready()
    for ticket in queue.statuses.each(READY, first, (first // boundary + 1) * boundary):
        if not room.takes(state.groups[ticket]):
            break
        window.append(ticket)
    return tuple(window)


def whole_step(state: QueueState, task: str, boundary: int) -> tuple[int, ...]:
    """All tickets of the step of the lowest that is ready; empty while another one of them lacks
    what the task needs.

    Those that the task is done with are among them: of one that is made again it has to see the
    others too.
    """
    queue = state.tasks[task]
    first = queue.lowest_ready() // boundary * boundary
    end = first + boundary
    complete = end <= queue.statuses.end and queue.statuses.find(WAITING, first, end) < 0
    return (
        tuple(range(first, end)) if complete and queue.statuses.find(READY, first, end) >= 0 else ()
    )


def awaited(state: QueueState, task: str, ticket: int) -> str:
    """The role whose output ``ticket``, which ``task`` cannot take yet, lacks: who makes rows
    before all others."""
    queue, group = state.tasks[task], state.groups.get(ticket)
    if group is None or not group.present & state.generated:
        return state.plan.maker
    lacks = queue.needs & ~group.present
    return next(
        (name for name, other in state.tasks.items() if other.gives & lacks), state.plan.maker
    )


def fitting(state: QueueState, window: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """First tickets of ``window``, as many as fit: a row that was lost and made again may be
    longer."""
    room = Budget(budget, state.plan.samples_per_prompt)
    return tuple(takewhile(lambda ticket: room.takes(state.groups[ticket]), window))
