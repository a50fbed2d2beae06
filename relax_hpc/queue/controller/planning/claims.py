"""Rules for the windows that a task may claim. All functions depend on the state only."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.queue.controller.planning import step_sets, windows
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.state.task_queues import READY
from relax_hpc.queue.samplers import Assignment, assign_groups


def claimable(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """The next window of ``task``: ready tickets whose tokens fit ``budget``. One group always
    fits.

    A window never crosses a multiple of ``boundary`` tickets. In ticket order, it is complete: the
    next group would not fit, or the boundary is reached.
    """
    queue = state.tasks[task]
    if queue.whole_step:
        return windows.cut_whole_step(state, task, boundary)
    edge = (queue.position // boundary + 1) * boundary
    for window in queue.returned:
        # A returned window that begins after the boundary waits until all earlier tickets are
        # taken.
        if window[0] < edge and all(queue.statuses[ticket] == READY for ticket in window):
            return windows.cut_fitting(state, window, budget)
    if queue.in_sets:
        return step_sets.next_window(state, task, budget, boundary)[0]
    cut = windows.cut_in_order if queue.in_order else windows.cut_ready
    return cut(state, task, budget, boundary)


def awaited(state: QueueState, task: str, budget: int, boundary: int) -> tuple[str, str]:
    """The role for which ``task`` waits while no window is claimable, and the reason."""
    queue = state.tasks[task]
    if queue.in_sets and step_sets.next_window(state, task, budget, boundary)[1]:
        peer = windows.producer_of(state, task, step_sets.straggler(state, task))
        return peer, f"stragglers of {peer}"
    peer = windows.producer_of(state, task, queue.lowest_waiting())
    return peer, f"rows of {peer}"


def assign_rows(
    state: QueueState,
    tickets: Sequence[int],
    ranks: int,
    max_tokens: int,
    batch: int,
    max_media: int = 0,
) -> Assignment:
    """Assign the rows of window number ``batch`` to data ranks, in micro-batches of at most
    ``max_tokens``, of which at most ``max_media`` (0: any number) stand for media. If the loss
    compares episodes, rows of a prompt group stay together."""
    sizes = [state.groups[ticket].size for ticket in tickets]
    return assign_groups(sizes, ranks, max_tokens, max_media, batch, state.plan.compares)
