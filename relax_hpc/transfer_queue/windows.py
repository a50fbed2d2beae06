"""Cutting the prompt groups of a task into windows, which become micro-batches. Functions of the state alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_hpc.transfer_queue.tasks import HELD, READY

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.state import QueueState


def in_order(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """The next window in ticket order, known to be complete; empty while it is not, or not all of it is ready.

    What it holds depends on the groups' lengths alone, never on when they arrived.
    """
    queue, samples = state.tasks[task], state.plan.samples_per_group
    held = {ticket for window in queue.returned for ticket in window}
    window: list[int] = []
    start, width = queue.position, 0
    for ticket in range(start, (start // boundary + 1) * boundary):
        status = queue.statuses[ticket]
        if status >= HELD or ticket in held:
            continue
        group = state.groups.get(ticket)
        if group is None or not group.present & state.generated:
            return ()
        width = max(width, group.width)
        if window and (len(window) + 1) * samples * width > budget:
            break
        if status != READY:
            return ()
        window.append(ticket)
    return tuple(window)


def as_ready(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """What is ready now, lowest tickets first, as much as fits."""
    queue, samples = state.tasks[task], state.plan.samples_per_group
    window: list[int] = []
    width, first = 0, queue.lowest_ready()
    for ticket in queue.statuses.each(READY, first, (first // boundary + 1) * boundary):
        width = max(width, state.groups[ticket].width)
        if window and (len(window) + 1) * samples * width > budget:
            break
        window.append(ticket)
    return tuple(window)


def fitting(state: QueueState, window: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """As much of ``window`` as fits: a row that was lost and made again may be longer."""
    width = 0
    for count, ticket in enumerate(window):
        width = max(width, state.groups[ticket].width)
        if count and (count + 1) * state.plan.samples_per_group * width > budget:
            return window[:count]
    return window
