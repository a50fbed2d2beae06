"""Turns on devices that the actor and the engines share: one side makes room, and says so, before the other begins.

The actor has the first turn, and the first after its group began anew: it loads the model and publishes it. A turn of
the engines lasts from a version until each of them has nothing more to do for its step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.controller.state import QueueState

Side = Literal["actor", "engines"]
TURN = "turn"
"""What those wait for who want it."""


class Turns:
    """The part of a `QueueState` that knows whose turn it is."""

    def __init__(self) -> None:
        self.turn: Side = "actor"
        self.rested: dict[str, int] = {}
        """Of the engines in this lineage, the last step that each has made room after."""

    def _begin_turns(self: QueueState, group: str) -> None:
        """Incarnations of ``group`` have ended, and what they had of the devices is free."""
        self.rested = {reader: step for reader, step in self.rested.items() if reader in self.readers}
        if group == self.plan.colocated:
            self.turn = "actor"

    def _on_turn(self: QueueState, side: Side) -> None:
        self.turn = side
        self.woken.add(TURN)

    def _on_rest(self: QueueState, reader: str, step: int) -> None:
        self.rested[reader] = step
        self.woken.add(TURN)
