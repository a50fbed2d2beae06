"""Requests about turns of the actor and the engines on devices that they share; see
`state.device_turns`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.messages import Request
from relax_hpc.queue.controller.planning.training import is_safe
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.topics import DISK, TURN
from relax_hpc.queue.controller.waiting import NotYet

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService


@handles("take_turn")
def take_turn(service: QueueService, request: Request, side: str, step: int = 0) -> Any:
    """Answered when the devices are free for ``side``: for an actor that is to train ``step``, or
    for engines."""
    turns = service.state.device_turns
    if side != "actor" and turns.side != side:
        raise NotYet(TURN, "waits for the actor to make room")
    if side == "actor" and turns.side != side:
        free = sum(rested >= step for rested in turns.rested.values())
        if free < service.plan.engines:
            raise NotYet(
                TURN, f"waits for engines to make room: {free} of {service.plan.engines} have"
            )
        service.record(op="turn", side="actor")
    return {}


@handles("end_turn")
def end_turn(service: QueueService, request: Request) -> Any:
    """End the actor's turn: it has made room."""
    if service.state.device_turns.side == "actor":
        service.record(op="turn", side="engines")
    return {}


@handles("step_generated")
def step_generated(service: QueueService, request: Request, step: int) -> Any:
    """Answered when all rows of ``step`` are there and on disk: no engine is needed before the next
    version."""
    state = service.state
    if state.progress.finished() or is_safe(state, state.tickets_of(step), state.generated):
        return {}
    raise NotYet(DISK, f"waits for the rows of step {step}")


@handles("rest")
def rest(service: QueueService, request: Request, reader: str, step: int) -> Any:
    """The engine ``reader`` has made room, having nothing more to do for ``step``."""
    service.record(op="rest", reader=reader, step=step)
    return {}
