"""Requests about claims: tasks claim windows of rows, and release claims that they cannot use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.messages import Refused, Request
from relax_hpc.queue.controller.planning.claims import assign_rows, awaited, claimable
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.topics import rows_for
from relax_hpc.queue.controller.waiting import NotYet
from relax_hpc.queue.records import NO_STEP

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.controller.state.queue_state import QueueState

MAX_RANKS = 1 << 13
"""Most ranks to which the rows of a claim can be assigned."""


@handles("claim")
def claim(
    service: QueueService,
    request: Request,
    task: str,
    budget: int,
    boundary: int,
    ranks: int = 0,
    max_tokens: int = 0,
    batch: int = 0,
    max_media: int = 0,
) -> Any:
    """The next window of ``task``. With ``ranks``, its rows are assigned to them, see
    `planning.claims.assign_rows`.

    The assignment is in the journal before any rank sees it, so a repeated request gets the same.
    """
    state = service.state
    _check(state, task, boundary, ranks, max_tokens, max_media)
    number = state.leases.by_key.get(request.key, 0)
    if number and not state.leases[number].tickets:
        # The request is repeated after all tickets of its lease were dropped.
        service.record(op="release", lease=number)
        number = 0
    if not number:
        _check_turn(state, task)
        tickets = claimable(state, task, budget, boundary)
        if not tickets and state.progress.finished():
            return {"finished": True}
        if not tickets:
            peer, reason = awaited(state, task, budget, boundary)
            common = not state.tasks[task].in_order
            raise NotYet(rows_for(task), f"waits for {reason}", common, (peer, reason))
        number = state.leases.next
        assignment = (
            assign_rows(state, tickets, ranks, max_tokens, batch, max_media) if ranks else []
        )
        service.record(
            op="claim",
            task=task,
            owner=request.owner,
            key=request.key,
            number=number,
            tickets=list(tickets),
            assignment=assignment,
        )
    return {**_describe_lease(state, number), "waited": request.waits()}


def _check(
    state: QueueState, task: str, boundary: int, ranks: int, max_tokens: int, max_media: int
) -> None:
    if not 0 <= ranks <= MAX_RANKS or (ranks and max_tokens < 1) or max_media < 0:
        values = f"{ranks} ranks, micro-batches of {max_tokens} tokens, {max_media} of media"
        raise Refused(
            "refused",
            f"claim: found {values}, allowed at most {MAX_RANKS}, at least 1, and 0 or more",
        )
    if task not in state.tasks or boundary < 1:
        allowed = f"a task ({', '.join(state.tasks)}) and a boundary of at least 1"
        raise Refused("refused", f"claim: found {task!r:.40} and {boundary}, allowed {allowed}")


def _check_turn(state: QueueState, task: str) -> None:
    """Let another trainer wait while a restarted policy has not said at which step it resumes,
    because the trainer may have to resume earlier too."""
    trainers, ended = state.plan.trainers, state.progress.trained[POLICY] == state.plan.steps
    if task == POLICY or task not in trainers or ended:
        return
    if state.lineage.incarnation < state.members.incarnations.get(trainers[POLICY], 0):
        reason = f"waits until {POLICY} resumes"
        raise NotYet(rows_for(task), reason, False, (POLICY, "the step at which it resumes"))


def _describe_lease(state: QueueState, number: int) -> dict[str, Any]:
    """A lease for its holder: the tickets, the first of their positions in the order of training,
    the shards with the fields that its task needs, and the assignment to ranks."""
    lease = state.leases[number]
    tickets, queue = lease.tickets, state.tasks[lease.task]
    groups = [(ticket, state.groups[ticket]) for ticket in tickets]
    shards = state.tickets_by_shard(tickets, queue.needs)
    step = state.step_of(tickets[0]) if tickets else 0
    positions = [group.position for _, group in groups if group.position != NO_STEP]
    finished: list[int] = []
    if queue.whole_step:
        finished = [ticket for ticket, group in groups if group.has(queue.gives)]
    return {
        "lease": number,
        "step": step,
        "place": min(positions, default=min(tickets, default=0)),
        "tickets": list(tickets),
        "episodes": [group.episodes for _, group in groups],
        "shards": [{**_descriptor(state, n), "tickets": shards[n]} for n in sorted(shards)],
        "min_version": 0 if state.plan.max_staleness else step,
        "with_media": [ticket for ticket in tickets if ticket in state.media.holders],
        "assignment": lease.assignment,
        "given": finished,
    }


def _descriptor(state: QueueState, number: int) -> dict[str, Any]:
    """A shard's descriptor. If the incarnation of its producer has ended, it names no planes,
    because reads of them could hang."""
    shard = state.shards[number]
    if state.members.lowest_allowed(shard.owner):
        return {**shard.descriptor, "planes": {}}
    return shard.descriptor


@handles("release")
def release(service: QueueService, request: Request, lease: int) -> Any:
    """Release a claim that its holder cannot use."""
    held = service.state.leases.get(lease)
    if held and held.owner == request.owner:
        service.record(op="release", lease=lease)
    return {}
