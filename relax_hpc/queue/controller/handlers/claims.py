"""Requests about claims: tasks claim windows of rows, and give back what they cannot use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.messages import Refused, Request
from relax_hpc.queue.controller.planning.claims import assignment, awaited, claimable
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.topics import rows_for
from relax_hpc.queue.controller.waiting import NotYet
from relax_hpc.queue.records import NO_STEP

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.controller.state.queue_state import QueueState

MAX_RANKS = 1 << 13
"""Ranks to which a claim may be dealt, at most."""


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
    """The next window of ``task``; with ``ranks``, its rows are dealt to them, see
    `planning.claims.assignment`.

    The assignment is in the journal before any rank sees it: whoever asks again finds the same.
    """
    state = service.state
    _check(state, task, boundary, ranks, max_tokens, max_media)
    number = state.leases.by_key.get(request.key, 0)
    if number and not state.leases[number].tickets:
        # Asked again after everything in it was dropped.
        service.record(op="release", lease=number)
        number = 0
    if not number:
        _check_turn(state, task)
        tickets = claimable(state, task, budget, boundary)
        if not tickets and state.progress.finished():
            return {"finished": True}
        if not tickets:
            peer, what = awaited(state, task, budget, boundary)
            raise NotYet(
                rows_for(task), f"waits for {what}", not state.tasks[task].in_order, (peer, what)
            )
        number = state.leases.next
        about = {"task": task, "owner": request.owner, "key": request.key, "number": number}
        dealt = assignment(state, tickets, ranks, max_tokens, batch, max_media) if ranks else []
        service.record(op="claim", **about, tickets=list(tickets), assignment=dealt)
    return {**_described(state, number), "waited": request.waited_for()}


def _check(
    state: QueueState, task: str, boundary: int, ranks: int, max_tokens: int, max_media: int
) -> None:
    if not 0 <= ranks <= MAX_RANKS or (ranks and max_tokens < 1) or max_media < 0:
        found = f"{ranks} ranks, micro-batches of {max_tokens} tokens, {max_media} of media"
        raise Refused(
            "refused",
            f"claim: found {found}, allowed at most {MAX_RANKS}, at least 1, and 0 or more",
        )
    if task not in state.tasks or boundary < 1:
        allowed = f"a task ({', '.join(state.tasks)}) and a boundary of at least 1"
        raise Refused("refused", f"claim: found {task!r:.40} and {boundary}, allowed {allowed}")


def _check_turn(state: QueueState, task: str) -> None:
    """Let another trainer wait while the policy is about to say where it goes on: it would have to
    go back too."""
    trainers, ended = state.plan.trainers, state.progress.trained[POLICY] == state.plan.steps
    if task == POLICY or task not in trainers or ended:
        return
    if state.lineage.incarnation < state.members.incarnations.get(trainers[POLICY], 0):
        raise NotYet(
            rows_for(task), f"waits for where {POLICY} goes on", False, (POLICY, "where it goes on")
        )


def _described(state: QueueState, number: int) -> dict[str, Any]:
    """A lease as its holder needs it: the tickets, the first of their places in the order of
    training, the shards with the fields of its task, and who takes which."""
    held = state.leases[number]
    tickets, queue = held.tickets, state.tasks[held.task]
    groups = [(ticket, state.groups[ticket]) for ticket in tickets]
    seen = groups if queue.whole_step else ()
    shards = state.by_shard(tickets, queue.needs)
    step = state.step_of(tickets[0]) if tickets else 0
    places = [group.position for _, group in groups if group.position != NO_STEP]
    return {
        "lease": number,
        "step": step,
        "place": min(places, default=min(tickets, default=0)),
        "tickets": list(tickets),
        "episodes": [group.episodes for _, group in groups],
        "shards": [{**_where(state, n), "tickets": shards[n]} for n in sorted(shards)],
        "min_version": 0 if state.plan.max_staleness else step,
        "with_media": [ticket for ticket in tickets if ticket in state.media.holders],
        "assignment": held.assignment,
        "given": [ticket for ticket, group in seen if group.has(queue.gives)],
    }


def _where(state: QueueState, number: int) -> dict[str, Any]:
    """A shard's descriptor. What a maker had in memory whose lease is over nobody need try: reads
    could hang."""
    shard = state.shards[number]
    return (
        {**shard.descriptor, "planes": {}}
        if state.members.lowest_allowed(shard.owner)
        else shard.descriptor
    )


@handles("release")
def release(service: QueueService, request: Request, lease: int) -> Any:
    """Release a claim that its holder cannot use."""
    held = service.state.leases.get(lease)
    if held and held.owner == request.owner:
        service.record(op="release", lease=lease)
    return {}
