"""Figures of a trainer's steps. Functions of the state alone."""

from __future__ import annotations

from collections.abc import Collection

from relax_hpc.queue.controller.state.queue_state import QueueState


def is_safe(state: QueueState, tickets: Collection[int], needs: int) -> bool:
    """Whether these prompt groups have all fields in ``needs``, none of which can be lost with its
    maker."""
    groups = [state.groups.get(ticket) for ticket in tickets]
    return all(group and group.has(needs) for group in groups) and not state.shards.waits_for_disk(
        tickets
    )


def staleness(state: QueueState, step: int) -> list[int]:
    """Staleness of each prompt group of ``step``: the version trained minus the oldest version of
    its tokens."""
    groups = (state.groups.get(ticket) for ticket in state.tickets_of(step))
    return [step - state.lineage.origin(tuple(group.versions))[1] for group in groups if group]
