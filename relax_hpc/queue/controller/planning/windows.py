"""Windows of prompt groups for a task, which become micro-batches. All functions depend on the
state only."""

from __future__ import annotations

from itertools import chain, takewhile
from typing import TYPE_CHECKING

from relax_hpc.queue.controller.state.task_queues import HELD, READY, WAITING
from relax_hpc.queue.records import PromptGroup

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


class WindowBudget:
    """Tokens of a window: the rows of all its groups must fit ``budget``."""

    def __init__(self, budget: int, episodes: int) -> None:
        """``episodes``: number in a prompt group, each of at least one row."""
        self.budget, self.episodes = budget, episodes
        self.groups = self.tokens = 0

    def add(self, group: PromptGroup) -> bool:
        """Count ``group``; whether it fits. The first one always does."""
        self.groups += 1
        self.tokens += sum(group.row_tokens)
        return self.groups == 1 or self.tokens <= self.budget

    @property
    def full(self) -> bool:
        """Whether no other group would fit, whatever its lengths are, so that no task has to wait
        for them."""
        return self.groups > 0 and self.tokens + self.episodes > self.budget


def cut_in_order(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """The next window in ticket order; empty until it is complete and ready.

    It depends only on the lengths of the groups, not on when they arrived.
    """
    queue = state.tasks[task]
    window_budget = WindowBudget(budget, state.plan.samples_per_prompt)
    start = queue.position
    returned = set(chain.from_iterable(queue.returned))
    window: list[int] = []
    for ticket in range(start, (start // boundary + 1) * boundary):
        status = queue.statuses[ticket]
        if status >= HELD or ticket in returned:
            continue
        if window_budget.full:
            break
        group = state.groups.get(ticket)
        if group is None or not group.present & state.generated:
            return ()
        if not window_budget.add(group):
            break
        if status != READY:
            return ()
        window.append(ticket)
    return tuple(window)


def cut_ready(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """The lowest ready tickets, as many as fit."""
    queue = state.tasks[task]
    window_budget = WindowBudget(budget, state.plan.samples_per_prompt)
    window: list[int] = []
    first = queue.lowest_ready()
    for ticket in queue.statuses.each(READY, first, (first // boundary + 1) * boundary):
        if not window_budget.add(state.groups[ticket]):
            break
        window.append(ticket)
    return tuple(window)


def cut_whole_step(state: QueueState, task: str, boundary: int) -> tuple[int, ...]:
    """All tickets of the step of the lowest ready ticket; empty while one of them lacks a needed
    field.

    It includes tickets that the task has consumed: if one ticket is generated again, the task needs
    the others too.
    """
    queue = state.tasks[task]
    first = queue.lowest_ready() // boundary * boundary
    end = first + boundary
    complete = end <= queue.statuses.end and queue.statuses.find(WAITING, first, end) < 0
    if not complete or queue.statuses.find(READY, first, end) < 0:
        return ()
    return tuple(range(first, end))


def producer_of(state: QueueState, task: str, ticket: int) -> str:
    """The role that adds the fields for which ``task`` waits, of ``ticket``; the role that
    generates rows if there are none."""
    queue, group = state.tasks[task], state.groups.get(ticket)
    if group is None or not group.present & state.generated:
        return state.plan.maker
    missing = queue.needs & ~group.present
    producers = (name for name, producer in state.tasks.items() if producer.gives & missing)
    return next(producers, state.plan.maker)


def cut_fitting(state: QueueState, window: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """The first tickets of ``window``, as many as fit: a group that was generated again may be
    longer than before."""
    window_budget = WindowBudget(budget, state.plan.samples_per_prompt)
    return tuple(takewhile(lambda ticket: window_budget.add(state.groups[ticket]), window))
