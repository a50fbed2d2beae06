"""Requests about whose turn it is, see `transfer_queue.turns`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.transfer_queue.controller.messages import Request
from relax_hpc.transfer_queue.controller.parking import Parked
from relax_hpc.transfer_queue.controller.stock import DISK
from relax_hpc.transfer_queue.controller.turns import TURN

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.controller.desk import Desk


class TurnsDesk:
    """These handlers of a `Desk`."""

    def _do_take_turn(self: Desk, request: Request, side: str, step: int = 0) -> Any:
        """Answered when the devices are free for ``side``: for an actor that is to train ``step``, or for engines."""
        state = self.state
        if side != "actor" and state.turn != side:
            raise Parked(TURN, "waits for the actor to make room")
        if side == "actor" and state.turn != side:
            free = sum(rested >= step for rested in state.rested.values())
            if free < self.plan.engines:
                raise Parked(TURN, f"waits for engines to make room: {free} of {self.plan.engines} have")
            self._record(op="turn", side="actor")
        return {}

    def _do_end_turn(self: Desk, request: Request) -> Any:
        """The actor has made room."""
        if self.state.turn == "actor":
            self._record(op="turn", side="engines")
        return {}

    def _do_step_generated(self: Desk, request: Request, step: int) -> Any:
        """Answered when all rows of ``step`` are there and on disk: no engine is needed before the next version."""
        state = self.state
        if state.finished() or state.safe(state.tickets_of(step), state.generated):
            return {}
        raise Parked(DISK, f"waits for the rows of step {step}")

    def _do_rest(self: Desk, request: Request, reader: str, step: int) -> Any:
        """The engine ``reader`` has made room, having nothing more to do for ``step``."""
        self._record(op="rest", reader=reader, step=step)
        return {}
