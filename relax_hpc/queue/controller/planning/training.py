"""Values of a trainer's steps. All functions depend on the state only."""

from __future__ import annotations

from collections.abc import Collection

from relax_hpc.queue.controller.state.queue_state import QueueState


def are_on_disk(state: QueueState, tickets: Collection[int], needs: int) -> bool:
    """Whether these prompt groups have all fields in ``needs``, and all are on disk, so that none
    can be lost with its producer."""
    groups = [state.groups.get(ticket) for ticket in tickets]
    if not all(group and group.has(needs) for group in groups):
        return False
    return not state.shards.waits_for_disk(tickets)


def staleness(state: QueueState, step: int) -> list[int]:
    """Staleness of each prompt group of ``step``: the trained version minus the oldest version of
    its tokens."""
    groups = (state.groups.get(ticket) for ticket in state.tickets_of(step))
    return [step - state.lineage.origin(tuple(group.versions))[1] for group in groups if group]
