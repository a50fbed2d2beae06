"""Reports of roles, and requests of observers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from relax_hpc.config.roles import POLICY, ROLES
from relax_hpc.queue.controller.messages import Request
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.state.task_queues import DONE
from relax_hpc.queue.controller.topics import NEWS
from relax_hpc.queue.controller.waiting import NotYet

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.controller.state.queue_state import QueueState


@handles("note")
def note(service: QueueService, request: Request, what: str, name: str, reason: str) -> Any:
    """Count a fault that concerns no ticket: of an engine, or in a line of a prompt file."""
    service.record(op="note", what=what, name=name, reason=reason)
    return {}


@handles("report")
def report(
    service: QueueService,
    request: Request,
    role: str,
    step: int,
    values: dict[str, float],
    seconds: dict[str, float],
) -> Any:
    """Receive a role's metrics of a step."""
    service.on_report(role, step, values, seconds)
    return {}


@handles("show")
def show(service: QueueService, request: Request, step: int, texts: list[str]) -> Any:
    """Show texts to people, such as samples of ``step``."""
    service.on_show(step, texts)
    return {}


@handles("first_failure")
def first_failure(
    service: QueueService, request: Request, reason: str, detail: str, location: str, traceback: str
) -> Any:
    """Receive the first failure of a kind in a process; see `metrics.first_failures`."""
    group = str(request.owner[0])
    service.on_first_failure(group, reason, detail, location, traceback)
    return {}


@handles("over")
def over(service: QueueService, request: Request) -> Any:
    """Answer when the run is finished."""
    if service.state.progress.finished():
        return {}
    raise NotYet(NEWS)


@handles("status")
def status(service: QueueService, request: Request) -> Any:
    """Progress of the run, and the requests that wait."""
    state, now = service.state, time.monotonic()
    tickets, weights, progress = state.tickets, state.weights, state.progress
    return {
        "trained_steps": progress.trained_steps,
        "accepted": state.counts.accepted,
        "steps": service.plan.steps,
        "newest": str(weights.newest) if weights.newest else "",
        "readers": {name: str(version) for name, (_, version) in weights.readers.items()},
        "depth": tickets.depth(),
        "oldest_s": {
            "generating": tickets.generating.oldest_s(),
            "ready": tickets.untrained.oldest_s(),
        },
        "untrained_bytes": state.shards.untrained_bytes,
        "dropped": dict(state.counts.dropped),
        "noted": dict(state.counts.noted),
        "disk": service.beats.disk_waits(),
        "segments": state.segments.counts(),
        "refused_connections": service.refused_connections,
        "checkpoints": [point for point in progress.parts(POLICY) if point["whole"]],
        "incarnations": state.members.incarnations,
        "beats": {
            name: {**beat, "age_s": now - beat["at"]} for name, beat in service.beats.latest.items()
        },
        "lacking": service.presence.report(now),
        "finished": progress.finished(),
        "worked": _roles_that_worked(service.state),
        "waiting": [_describe_wait(request) for request in service.waiting],
    }


def _describe_wait(request: Request) -> str:
    """A waiting request in text: the group, the operation, and the reason."""
    return ": ".join(filter(None, (request.owner[0], request.op, request.reason)))


def _roles_that_worked(state: QueueState) -> list[str]:
    """Roles whose rows or fields were accepted, or that have trained a step."""
    done = {name for name, queue in state.tasks.items() if queue.statuses.find(DONE, 0) >= 0}
    # A trainer that also adds fields has a second task for them.
    worked = {name for name, role in ROLES.items() if name in done or role.scores in done}
    worked |= {role for role, steps in state.progress.trained.items() if steps > 0}
    if state.counts.accepted:
        worked.add(state.plan.maker)
    return sorted(worked)
