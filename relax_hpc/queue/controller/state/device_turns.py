"""Turns on devices that the actor and the engines share: one side makes room, and says so, before
the other begins.

The actor has the first turn, and the first after its group began anew: it loads the model and
publishes it. A turn of the engines lasts from a version until each of them has nothing more to do
for its step.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.topics import TURN

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


Side = Literal["actor", "engines"]


@dataclass(slots=True)
class DeviceTurns:
    """Side that has its turn on the devices."""

    side: Side = "actor"
    rested: dict[str, int] = field(default_factory=dict)
    """Last step that each engine has made room after, in this lineage."""

    def keep_engines(self, readers: Container[str]) -> None:
        """Forget engines other than ``readers``: they have ended, and what they had of the devices
        is free."""
        self.rested = {reader: step for reader, step in self.rested.items() if reader in readers}

    def dump(self) -> Any:
        return self.side, self.rested

    def load(self, values: Any) -> None:
        self.side, self.rested = values


@applies("turn")
def take_turn(state: QueueState, side: Side) -> None:
    state.device_turns.side = side
    state.woken.add(TURN)


@applies("rest")
def rest(state: QueueState, reader: str, step: int) -> None:
    state.device_turns.rested[reader] = step
    state.woken.add(TURN)
