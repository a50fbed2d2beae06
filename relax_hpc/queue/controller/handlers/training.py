"""Requests of trainers: check that their rows are on disk, report trained steps and checkpoints,
and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.messages import Refused, Request
from relax_hpc.queue.controller.planning.training import are_on_disk, staleness
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.topics import ALL, DISK
from relax_hpc.queue.controller.waiting import NotYet
from relax_hpc.queue.records import Lease, Owner
from relax_hpc.queue.storage.shard import check_name

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.controller.state.queue_state import QueueState


@handles("settled")
def settled(service: QueueService, request: Request, leases: list[int]) -> Any:
    """Tickets of the leases that the group still holds unchanged, when all of them are on disk.
    Nothing can take these away then.

    A trainer sends this request before it changes its weights. So rows that are lost with their
    producer have cost no more than gradients.
    """
    state = service.state
    tickets: set[int] = set()
    for number in leases:
        lease = state.leases.get(number)
        if lease and lease.owner == request.owner:
            tickets |= _unchanged_tickets(state, lease)
    if state.shards.waits_for_disk(tickets):
        raise NotYet(DISK, "rows are not saved yet")
    return {"tickets": sorted(tickets)}


def _unchanged_tickets(state: QueueState, lease: Lease) -> set[int]:
    """Tickets of ``lease`` that have all fields that the task needs, in the shards of the claim.
    Lost fields do not count, even if they were added again."""
    needs = state.tasks[lease.task].needs
    unchanged = {ticket for ticket in lease.tickets if state.groups[ticket].has(needs)}
    for number, tickets in state.tickets_by_shard(lease.tickets, needs).items():
        if number not in lease.shards:
            unchanged.difference_update(tickets)
    return unchanged


@handles("trained")
def trained(
    service: QueueService, request: Request, step: int, leases: list[int], task: str = POLICY
) -> Any:
    """A trainer has trained ``step``. Answer when all rows of the step are on disk."""
    state = service.state
    _check_trainer(service, "trained", task)
    if step >= state.progress.trained[task]:
        _check_trained(state, task, request.owner, step, leases)
        if not are_on_disk(state, state.tickets_of(step), state.tasks[task].needs):
            raise NotYet(DISK, f"rows of step {step} are not saved yet")
        save_at = _next_timed_save(service, step)
        timed = {"save_at": save_at} if save_at else {}
        service.record(op="trained", task=task, step=step, leases=leases, **timed)
    return {
        "staleness": staleness(state, step),
        "lag": state.weights.publish_lag(step),
        "save_next": step + 2 in state.progress.timed_saves,
    }


def _next_timed_save(service: QueueService, step: int) -> int:
    """Step of the checkpoint that is due by time at the end of the step after ``step``; 0: none is.

    It is decided when the first trainer has trained ``step``. Other trainers get the same answer.
    """
    progress = service.state.progress
    if step < progress.furthest:
        return 0
    saves_now = step + 1 in progress.timed_saves
    is_due = service.save_clock.is_next_due(step + 1, saves_now)
    is_known = step + 2 in progress.timed_saves
    return step + 2 if is_due and not is_known else 0


def _check_trainer(service: QueueService, op: str, task: str) -> None:
    if task not in service.plan.trainers:
        raise Refused(
            "refused", f"{op}: task: found {task!r:.40}, allowed {', '.join(service.plan.trainers)}"
        )


def _check_trained(
    state: QueueState, task: str, owner: Owner, step: int, leases: list[int]
) -> None:
    """Refused: the leases are not exactly the tickets of the step, all held by this trainer."""
    held = [state.leases.get(lease) for lease in leases]
    lost, tickets = [], list[int]()
    for number, lease in zip(leases, held, strict=True):
        if lease is None or (lease.task, lease.owner) != (task, owner):
            lost.append(number)
        tickets += lease.tickets if lease else ()
    expected = state.progress.trained[task]
    of_step = sorted(state.tickets_of(step))
    is_complete = sorted(tickets) == of_step and len(of_step) == state.plan.prompts_per_step
    if step != expected or lost or not is_complete:
        raise Refused(
            "refused",
            f"trained: step {step} (expected {expected}) with tickets {sorted(tickets)}, leases "
            f"lost: {lost}",
        )


@handles("resume")
def resume(service: QueueService, request: Request, step: int, task: str = POLICY) -> Any:
    """A trainer resumes at ``step``, from its part of a checkpoint or from the start."""
    progress, incarnation = service.state.progress, request.owner[1]
    _check_trainer(service, "resume", task)
    if not 0 <= step <= service.plan.steps:
        raise Refused("refused", f"resume: step {step}, the run has {service.plan.steps}")
    if progress.incarnations.get(task, 0) < incarnation:
        complete = progress.complete_steps
        if task != POLICY and step not in (0, *complete):
            # The policy has resumed earlier after this trainer asked for checkpoints.
            raise Refused(
                "refused", f"resume: step {step} of {task}, complete checkpoints are of {complete}"
            )
        service.record(op="resume", task=task, incarnation=incarnation, step=step)
        if task == POLICY:
            service.on_resume(step)
    return {}


@handles("checkpoints")
def checkpoints(service: QueueService, request: Request, task: str = POLICY) -> Any:
    """A trainer's parts of all checkpoints that are complete, or may still be completed; the latest
    last."""
    return {"checkpoints": service.state.progress.parts(task)}


@handles("whole")
def whole(service: QueueService, request: Request, step: int, seen: int) -> Any:
    """Whether all trainers have saved their parts of ``step``. Answer when they have, or when the
    number of trained steps is not ``seen``."""
    progress = service.state.progress
    is_complete = step in progress.complete_steps
    if not is_complete and progress.trained_steps == seen:
        missing = [
            task
            for task in progress.trained
            if step not in [point["step"] for point in progress.parts(task)]
        ]
        raise NotYet(ALL, f"waits for {', '.join(missing)} to save step {step}")
    return {"whole": is_complete, "trained_steps": progress.trained_steps}


@handles("checkpoint")
def checkpoint(
    service: QueueService, request: Request, step: int, name: str, digest: str, task: str = POLICY
) -> Any:
    """Record that a trainer's part of a checkpoint is on disk."""
    progress = service.state.progress
    _check_trainer(service, "checkpoint", task)
    part = {
        "step": step,
        "incarnation": request.owner[1],
        "name": check_name(name),
        "digest": digest,
    }
    saved = [{name: point[name] for name in part} for point in progress.parts(task)]
    if part not in saved:
        if not 0 <= step <= progress.trained[task]:
            raise Refused(
                "refused", f"checkpoint: step {step}, trained are {progress.trained[task]}"
            )
        service.record(op="checkpoint", task=task, **part)
    return {}
