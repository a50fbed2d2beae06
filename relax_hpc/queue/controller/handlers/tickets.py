"""Requests about tickets: engines are admitted to them, give them back, and say which attempts came
to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.messages import Request
from relax_hpc.queue.controller.planning.admission import admissible, why_not
from relax_hpc.queue.controller.planning.segments import logs_of, spares_for
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.topics import ADMISSION
from relax_hpc.queue.controller.waiting import NotYet

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService


@handles("admit")
def admit(service: QueueService, request: Request, reader: str, count: int) -> Any:
    """Tickets that the engine ``reader`` may start with the version it serves."""
    state, (_, version) = service.state, service.state.weights.readers.get(reader, (None, None))
    tickets = state.admissions.recall(request.key)
    if tickets is None and version and (tickets := admissible(state, version, count)):
        spares = spares_for(state, tickets, version.number)
        also = {"spares": spares} if spares else {}
        service.record(
            op="admit",
            owner=request.owner,
            key=request.key,
            tickets=tickets,
            version=str(version),
            **also,
        )
    if tickets:
        groups = [state.groups[ticket] for ticket in tickets]
        attempts = [group.attempt for group in groups]
        failures = {
            t: group.failures for t, group in zip(tickets, groups, strict=True) if group.failures
        }
        about = {"attempts": attempts, "failures": failures, "waited": request.waited_for()}
        return {"tickets": tickets, **logs_of(state, tickets), **about}
    if state.progress.finished():
        return {"finished": True}
    raise NotYet(ADMISSION, *why_not(state, version))


@handles("give_back")
def give_back(service: QueueService, request: Request, ticket: int) -> Any:
    """An engine works on a ticket no more: another one goes on with what its log has."""
    state, group = service.state, service.state.groups.get(ticket)
    # One that was given back may be out again, to the same owner, when this is asked once more.
    mine = group and group.owner == request.owner and state.admissions.recall(request.key) is None
    if mine and ticket in state.tickets.generating:
        service.record(op="give_back", owner=request.owner, key=request.key, ticket=ticket)
    return {}


@handles("fail")
def fail(service: QueueService, request: Request, ticket: int, attempt: int, reason: str) -> Any:
    """An attempt came to nothing; the number of the next one, and a spare in its place if there is
    any."""
    group = service.state.groups[ticket]
    mine = group.owner == request.owner
    if mine and group.attempt == attempt:
        service.record(op="fail", ticket=ticket, reason=reason)
        if spares := spares_for(service.state, [ticket], group.last - service.plan.max_staleness):
            service.record(op="bind", spares=spares)
    logs = logs_of(service.state, [ticket] if mine else [])
    return {"attempt": group.attempt, "failures": group.failures, **logs}
