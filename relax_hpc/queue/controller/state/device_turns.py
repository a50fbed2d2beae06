"""Turns on devices that the actor and the engines share. One side frees the devices and reports it
before the other begins.

The actor has the first turn, and the first after a restart of its group: it loads the model and
publishes it. A turn of the engines lasts from a version until no engine has work left for its step.
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
    """The side that may use the devices."""

    side: Side = "actor"
    freed_after: dict[str, int] = field(default_factory=dict)
    """Last step after which each engine has freed the devices, in this lineage."""

    def keep_engines(self, readers: Container[str]) -> None:
        """Forget engines other than ``readers``. They have ended, and no longer use the devices."""
        self.freed_after = {
            reader: step for reader, step in self.freed_after.items() if reader in readers
        }

    def dump(self) -> Any:
        return self.side, self.freed_after

    def load(self, values: Any) -> None:
        self.side, self.freed_after = values


@applies("turn")
def take_turn(state: QueueState, side: Side) -> None:
    state.device_turns.side = side
    state.woken.add(TURN)


@applies("rest")
def end_engine_turn(state: QueueState, reader: str, step: int) -> None:
    state.device_turns.freed_after[reader] = step
    state.woken.add(TURN)
