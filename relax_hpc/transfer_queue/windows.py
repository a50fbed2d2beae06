"""Cutting the prompt groups of a task into windows, which become micro-batches. Functions of the state alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.state import QueueState


def in_order(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """The next window in ticket order, known to be complete; empty while it is not, or not all of it is ready.

    What it holds depends on the groups' lengths alone, never on when they arrived.
    """
    held = {ticket for window in state.returned[task] for ticket in window}
    window: list[int] = []
    start, width = state.position[task], 0
    for ticket in range(start, (start // boundary + 1) * boundary):
        group = state.groups.get(ticket)
        if group is None or group.present.get("token_ids") != state.full:
            return ()
        if task in group.tasks or ticket in held:
            continue
        width = max(width, group.width)
        if window and (len(window) + 1) * state.plan.samples_per_group * width > budget:
            break
        window.append(ticket)
    return tuple(window) if all(state.ready(task, ticket) for ticket in window) else ()


def as_ready(state: QueueState, task: str, budget: int, boundary: int) -> tuple[int, ...]:
    """What is ready now, lowest tickets first, as much as fits."""
    window: list[int] = []
    width = 0
    for ticket in range(state.position[task], state.next_ticket):
        if not state.ready(task, ticket):
            continue
        width = max(width, state.groups[ticket].width)
        too_long = (len(window) + 1) * state.plan.samples_per_group * width > budget
        if window and (too_long or ticket // boundary != window[0] // boundary):
            break
        window.append(ticket)
    return tuple(window)
