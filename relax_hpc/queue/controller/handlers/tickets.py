"""Requests about tickets: engines are admitted to them, return them, and report failed attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.messages import Request
from relax_hpc.queue.controller.planning.admission import admissible, explain_wait
from relax_hpc.queue.controller.planning.segments import choose_spares, describe_logs
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.topics import ADMISSION
from relax_hpc.queue.controller.waiting import NotYet

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService


@handles("admit")
def admit(service: QueueService, request: Request, reader: str, count: int) -> Any:
    """Tickets that the engine ``reader`` may generate with the version that it serves."""
    state = service.state
    _, version = state.weights.readers.get(reader, (None, None))
    tickets = state.admissions.recall(request.key)
    if tickets is None and version:
        tickets = admissible(state, version, count)
        if tickets:
            _record_admission(service, request, tickets, version)
    if tickets:
        groups = {ticket: state.groups[ticket] for ticket in tickets}
        return {
            "tickets": tickets,
            **describe_logs(state, tickets),
            "attempts": [group.attempt for group in groups.values()],
            "failures": {t: group.failures for t, group in groups.items() if group.failures},
            "waited": request.waits(),
        }
    if state.progress.finished():
        return {"finished": True}
    raise NotYet(ADMISSION, *explain_wait(state, version))


def _record_admission(
    service: QueueService, request: Request, tickets: list[int], version: Version
) -> None:
    spares = choose_spares(service.state, tickets, version.number)
    service.record(
        op="admit",
        owner=request.owner,
        key=request.key,
        tickets=tickets,
        version=str(version),
        **({"spares": spares} if spares else {}),
    )


@handles("give_back")
def return_ticket(service: QueueService, request: Request, ticket: int) -> Any:
    """An engine stops working on a ticket. The next owner continues from its log."""
    state, group = service.state, service.state.groups.get(ticket)
    # If the request is repeated, the ticket may have been admitted to the same owner again.
    is_new = state.admissions.recall(request.key) is None
    is_owner = group is not None and group.owner == request.owner
    if is_new and is_owner and ticket in state.tickets.generating:
        service.record(op="give_back", owner=request.owner, key=request.key, ticket=ticket)
    return {}


@handles("fail")
def fail(service: QueueService, request: Request, ticket: int, attempt: int, reason: str) -> Any:
    """An attempt failed; the number of the next one, and a spare for it if there is any."""
    state = service.state
    group = state.groups[ticket]
    is_owner = group.owner == request.owner
    if is_owner and group.attempt == attempt:
        service.record(op="fail", ticket=ticket, reason=reason)
        spares = choose_spares(state, [ticket], group.last_step - service.plan.max_staleness)
        if spares:
            service.record(op="bind", spares=spares)
    logs = describe_logs(state, [ticket] if is_owner else [])
    return {"attempt": group.attempt, "failures": group.failures, **logs}
