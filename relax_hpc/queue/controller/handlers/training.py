"""Requests of trainers: they settle what they train on, train steps, save their parts of
checkpoints, and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.messages import Refused, Request
from relax_hpc.queue.controller.planning.training import is_safe, staleness
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
    """Tickets of its leases that the asking group still holds as it claimed them, once all of that
    is on disk: nothing can take them away then.

    A trainer asks before it changes its weights; rows that were lost with their maker cost no more
    than gradients.
    """
    state = service.state
    held = [state.leases.get(lease) for lease in leases]
    mine = [found for found in held if found and found.owner == request.owner]
    tickets = {ticket for found in mine for ticket in _as_claimed(state, found)}
    if state.shards.waits_for_disk(tickets):
        raise NotYet(DISK, "rows are not saved yet")
    return {"tickets": sorted(tickets)}


def _as_claimed(state: QueueState, lease: Lease) -> set[int]:
    """Tickets of ``lease`` none of whose fields that the task needs was lost since, also if it was
    given again."""
    needs = state.tasks[lease.task].needs
    sound = {ticket for ticket in lease.tickets if state.groups[ticket].has(needs)}
    for number, tickets in state.by_shard(lease.tickets, needs).items():
        if number not in lease.shards:
            sound.difference_update(tickets)
    return sound


@handles("trained")
def trained(
    service: QueueService, request: Request, step: int, leases: list[int], task: str = POLICY
) -> Any:
    """A trainer has done step ``step``; answered when all its rows are on disk."""
    state = service.state
    _check_trainer(service, "trained", task)
    if step >= state.progress.trained[task]:
        _check_trained(state, task, request.owner, step, leases)
        if not is_safe(state, state.tickets_of(step), state.tasks[task].needs):
            raise NotYet(DISK, f"rows of step {step} are not saved yet")
        save_at = _next_timed_save(service, step)
        due = {"save_at": save_at} if save_at else {}
        service.record(op="trained", task=task, step=step, leases=leases, **due)
    return {
        "staleness": staleness(state, step),
        "lag": state.weights.publish_lag(step),
        "save_next": step + 2 in state.progress.timed_saves,
    }


def _next_timed_save(service: QueueService, step: int) -> int:
    """Step of the checkpoint that is due by time at the end of the step after ``step``; 0: none.

    Decided when the first trainer has trained ``step``; the other trainers get the same answer.
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
    """Step t is trained on exactly the tickets of its set, all of them held by this trainer."""
    held = [state.leases.get(lease) for lease in leases]
    mine = [found is not None and (found.task, found.owner) == (task, owner) for found in held]
    lost = [lease for lease, found in zip(leases, mine, strict=True) if not found]
    tickets = sorted(ticket for found in held if found for ticket in found.tickets)
    expected = state.progress.trained[task]
    theirs = sorted(state.tickets_of(step))
    if step != expected or lost or tickets != theirs or len(theirs) != state.plan.prompts_per_step:
        raise Refused(
            "refused",
            f"trained: step {step} (expected {expected}) with tickets {tickets}, leases lost: "
            f"{lost}",
        )


@handles("resume")
def resume(service: QueueService, request: Request, step: int, task: str = POLICY) -> Any:
    """A trainer goes on at ``step``, with its part of a checkpoint or of the start."""
    progress, incarnation = service.state.progress, request.owner[1]
    _check_trainer(service, "resume", task)
    if not 0 <= step <= service.plan.steps:
        raise Refused("refused", f"resume: step {step}, the run has {service.plan.steps}")
    if progress.incarnations.get(task, 0) < incarnation:
        if task != POLICY and step not in (0, *progress.whole):
            # The policy has gone back since it was asked for checkpoints.
            raise Refused(
                "refused",
                f"resume: step {step} of {task}, whole checkpoints are of {progress.whole}",
            )
        service.record(op="resume", task=task, incarnation=incarnation, step=step)
        if task == POLICY:
            service.on_resume(step)
    return {}


@handles("checkpoints")
def checkpoints(service: QueueService, request: Request, task: str = POLICY) -> Any:
    """A trainer's parts of those that may be resumed from, or may be once others have their parts;
    the latest last."""
    return {"checkpoints": service.state.progress.parts(task)}


@handles("whole")
def whole(service: QueueService, request: Request, step: int, seen: int) -> Any:
    """Whether all trainers have saved their parts of ``step``, once they have, or have trained
    other than ``seen``."""
    progress = service.state.progress
    is_whole = step in progress.whole
    if not is_whole and progress.trained_steps == seen:
        lacking = [
            task
            for task in progress.trained
            if step not in [part["step"] for part in progress.parts(task)]
        ]
        raise NotYet(ALL, f"waits for {', '.join(lacking)} to save step {step}")
    return {"whole": is_whole, "trained_steps": progress.trained_steps}


@handles("checkpoint")
def checkpoint(
    service: QueueService, request: Request, step: int, name: str, digest: str, task: str = POLICY
) -> Any:
    """Note that a trainer's part of a checkpoint is on disk."""
    progress = service.state.progress
    _check_trainer(service, "checkpoint", task)
    part = {
        "step": step,
        "incarnation": request.owner[1],
        "name": check_name(name),
        "digest": digest,
    }
    if part not in [{name: found[name] for name in part} for found in progress.parts(task)]:
        if not 0 <= step <= progress.trained[task]:
            raise Refused(
                "refused", f"checkpoint: step {step}, trained are {progress.trained[task]}"
            )
        service.record(op="checkpoint", task=task, **part)
    return {}
