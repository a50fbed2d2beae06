"""Rules for what a task may claim next, and whom it waits for while there is nothing. Functions of
the state alone."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.queue.controller.planning import step_sets, windows
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.state.task_queues import READY
from relax_hpc.queue.samplers import Assignment, assign_groups


def claimable(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """The next window of ``task``: ready tickets whose tokens fit ``budget`` (one group always
    fits).

    A window never crosses a multiple of ``boundary`` tickets. In order, it is known to be complete:
    the group behind it would not fit, or the boundary is reached.
    """
    queue = state.tasks[task]
    if queue.whole_step:
        return windows.whole_step(state, task, boundary)
    edge = (queue.position // boundary + 1) * boundary
    for window in queue.returned:
        # One from behind the boundary waits until all before it was taken.
        if window[0] < edge and all(queue.statuses[ticket] == READY for ticket in window):
            return windows.fitting(state, window, budget)
    if queue.in_sets:
        return step_sets.next_window(state, task, budget, boundary)[0]
    cut = windows.in_order if queue.in_order else windows.as_ready
    return cut(state, task, budget, boundary)


def awaited(state: QueueState, task: str, budget: int, boundary: int) -> tuple[str, str]:
    """The role that ``task`` waits for while nothing is `claimable`, and for what of it."""
    queue = state.tasks[task]
    if queue.in_sets and step_sets.next_window(state, task, budget, boundary)[1]:
        peer = windows.awaited(state, task, step_sets.straggler(state, task))
        return peer, f"stragglers of {peer}"
    peer = windows.awaited(state, task, queue.lowest_waiting())
    return peer, f"rows of {peer}"


def assignment(
    state: QueueState,
    tickets: Sequence[int],
    ranks: int,
    max_tokens: int,
    batch: int,
    max_media: int = 0,
) -> Assignment:
    """The rows of window number ``batch`` dealt to data ranks, in micro-batches of ``max_tokens``,
    of which ``max_media`` (0: any number) stand for media; by whole prompt groups, whose rows stay
    in their order, where the loss compares these."""
    sizes = [state.groups[ticket].size for ticket in tickets]
    return assign_groups(sizes, ranks, max_tokens, max_media, batch, state.plan.compares)
