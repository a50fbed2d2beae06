"""Changes of turns: the actor and the engines take them on devices that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.device_turns import Side
from relax_hpc.queue.controller.topics import TURN

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@applies("turn")
def take_turn(state: QueueState, side: Side) -> None:
    state.device_turns.side = side
    state.woken.add(TURN)


@applies("rest")
def rest(state: QueueState, reader: str, step: int) -> None:
    state.device_turns.rested[reader] = step
    state.woken.add(TURN)
