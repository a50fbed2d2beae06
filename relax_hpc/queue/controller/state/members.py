"""Incarnations of groups, and the records that start and end them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.leases import release
from relax_hpc.queue.controller.state.rows import lose_shard
from relax_hpc.queue.controller.state.tickets import free_tickets_of
from relax_hpc.queue.controller.topics import ALL
from relax_hpc.queue.records import Owner

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@dataclass(slots=True)
class Members:
    """The incarnations of each group, by its name."""

    incarnations: dict[str, int] = field(default_factory=dict)
    """Newest known incarnation of each group."""
    ended: dict[str, int] = field(default_factory=dict)
    """Newest incarnation of each group that has ended."""

    def lowest_allowed(self, owner: Owner) -> int:
        """0 if messages of ``owner`` are accepted, else the lowest accepted incarnation."""
        group, incarnation = owner
        lowest = max(self.incarnations.get(group, 0), self.ended.get(group, 0) + 1)
        return lowest if incarnation < lowest else 0

    def dump(self) -> Any:
        return self.incarnations, self.ended

    def load(self, values: Any) -> None:
        self.incarnations, self.ended = values


@applies("register")
def register(state: QueueState, group: str, incarnation: int) -> None:
    if incarnation > state.members.incarnations.get(group, 0):
        state.members.incarnations[group] = incarnation
        _end_incarnations(state, group, incarnation)


@applies("down")
def end_incarnation(state: QueueState, group: str, incarnation: int) -> None:
    state.members.ended[group] = max(incarnation, state.members.ended.get(group, 0))
    _end_incarnations(state, group, incarnation + 1)


def _end_incarnations(state: QueueState, group: str, below: int) -> None:
    """Release everything that incarnations of ``group`` before incarnation ``below`` hold."""
    for lease in state.leases.held_by_group(group, below):
        release(state, lease)
    free_tickets_of(state, group, below)
    for number in state.shards.unsaved_of_group(group, below):
        lose_shard(state, number)
    state.weights.end_readers(group, below)
    state.device_turns.keep_engines(state.weights.readers)
    if group == state.plan.colocated:
        state.device_turns.side = "actor"
    state.admissions.forget(group, below)
    state.puts.forget(group, below)
    state.woken.add(ALL)


@applies("note")
def note(state: QueueState, what: str, name: str, reason: str) -> None:
    state.counts.noted[f"{what}/{reason}"] += 1
    state.events.add_named(name, what, state.progress.trained_steps, reason)
