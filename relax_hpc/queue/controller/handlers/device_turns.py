"""Requests about turns of the actor and the engines on shared devices; see `state.device_turns`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.messages import Request
from relax_hpc.queue.controller.planning.training import are_on_disk
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.topics import DISK, TURN
from relax_hpc.queue.controller.waiting import NotYet

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService


@handles("take_turn")
def take_turn(service: QueueService, request: Request, side: str, step: int = 0) -> Any:
    """Answer when the devices are free for ``side``: the actor, to train ``step``, or the
    engines."""
    turns = service.state.device_turns
    if side != "actor" and turns.side != side:
        raise NotYet(TURN, "waits for the actor to free the devices")
    if side == "actor" and turns.side != side:
        free = sum(step_freed >= step for step_freed in turns.freed_after.values())
        if free < service.plan.engines:
            text = f"waits for engines to free the devices: {free} of {service.plan.engines} have"
            raise NotYet(TURN, text)
        service.record(op="turn", side="actor")
    return {}


@handles("end_turn")
def end_turn(service: QueueService, request: Request) -> Any:
    """End the actor's turn: it has freed the devices."""
    if service.state.device_turns.side == "actor":
        service.record(op="turn", side="engines")
    return {}


@handles("step_generated")
def step_generated(service: QueueService, request: Request, step: int) -> Any:
    """Answer when all rows of ``step`` are on disk: no engine is needed before the next version."""
    state = service.state
    if state.progress.finished() or are_on_disk(state, state.tickets_of(step), state.generated):
        return {}
    raise NotYet(DISK, f"waits for the rows of step {step}")


@handles("rest")
def end_engine_turn(service: QueueService, request: Request, reader: str, step: int) -> Any:
    """The engine ``reader`` has no work left for ``step`` and has freed the devices."""
    service.record(op="rest", reader=reader, step=step)
    return {}
