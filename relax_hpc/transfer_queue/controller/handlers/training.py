"""The actor settles what it trains on, trains steps, saves checkpoints and resumes from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.transfer_queue.controller.messages import Refused, Request
from relax_hpc.transfer_queue.controller.planning.training import is_safe, staleness
from relax_hpc.transfer_queue.controller.registry import handles
from relax_hpc.transfer_queue.controller.topics import DISK
from relax_hpc.transfer_queue.controller.waiting import NotYet
from relax_hpc.transfer_queue.records import Lease, Owner
from relax_hpc.transfer_queue.storage.shard import check_name

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.controller.service import QueueService
    from relax_hpc.transfer_queue.controller.state.queue_state import QueueState


@handles("settled")
def settled(service: QueueService, request: Request, leases: list[int]) -> Any:
    """What of its leases the asking group still holds as it was claimed, once all of that is on disk: nothing can
    take it away then.

    An actor asks before it changes its weights; rows that were lost with their maker cost no more than gradients.
    """
    state = service.state
    held = [state.leases.get(lease) for lease in leases]
    mine = [found for found in held if found and found.owner == request.owner]
    tickets = {ticket for found in mine for ticket in found.tickets if _is_as_claimed(state, found, ticket)}
    if state.shards.waits_for_disk(tickets):
        raise NotYet(DISK, "rows are not saved yet")
    return {"tickets": sorted(tickets)}


def _is_as_claimed(state: QueueState, lease: Lease, ticket: int) -> bool:
    """Whether none of the fields that the task needs was lost since, also if it was given again."""
    group, needs = state.groups[ticket], state.tasks[lease.task].needs
    return group.has(needs) and set(state.shards_with(group, needs)).issubset(lease.shards)


@handles("trained")
def trained(service: QueueService, request: Request, step: int, leases: list[int]) -> Any:
    """Training step ``step`` was done; answered when all its rows are on disk."""
    state = service.state
    if step >= state.progress.trained_steps:
        _check_trained(state, request.owner, step, leases)
        if not is_safe(state, state.tickets_of(step), state.tasks["actor"].needs):
            raise NotYet(DISK, f"rows of step {step} are not saved yet")
        service.record(op="trained", step=step, leases=leases)
    return {"staleness": staleness(state, step), "lag": state.weights.publish_lag(step)}


def _check_trained(state: QueueState, owner: Owner, step: int, leases: list[int]) -> None:
    """Step t is trained on exactly the tickets of its set, all of them held by this actor."""
    held = [state.leases.get(lease) for lease in leases]
    mine = [found is not None and (found.task, found.owner) == ("actor", owner) for found in held]
    lost = [lease for lease, found in zip(leases, mine, strict=True) if not found]
    tickets = sorted(ticket for found in held if found for ticket in found.tickets)
    expected = state.progress.trained_steps
    theirs = sorted(state.tickets_of(step))
    if step != expected or lost or tickets != theirs or len(theirs) != state.plan.prompts_per_step:
        raise Refused(
            "refused", f"trained: step {step} (expected {expected}) with tickets {tickets}, leases lost: {lost}"
        )


@handles("resume")
def resume(service: QueueService, request: Request, step: int) -> Any:
    """The actor goes on at ``step``, with the weights of a checkpoint or of the start."""
    if not 0 <= step <= service.plan.steps:
        raise Refused("refused", f"resume: step {step}, the run has {service.plan.steps}")
    if service.state.lineage.incarnation < request.owner[1]:
        service.record(op="resume", incarnation=request.owner[1], step=step)
        service.on_resume(step)
    return {}


@handles("checkpoints")
def checkpoints(service: QueueService, request: Request) -> Any:
    """The checkpoints that may be resumed from, the latest last."""
    return {"checkpoints": service.state.progress.checkpoints}


@handles("checkpoint")
def checkpoint(service: QueueService, request: Request, step: int, name: str, digest: str) -> Any:
    """A checkpoint is whole."""
    progress = service.state.progress
    point = {"step": step, "incarnation": request.owner[1], "name": check_name(name), "digest": digest}
    if point not in progress.checkpoints:
        if not 0 <= step <= progress.trained_steps:
            raise Refused("refused", f"checkpoint: step {step}, trained are {progress.trained_steps}")
        service.record(op="checkpoint", **point)
    return {}
