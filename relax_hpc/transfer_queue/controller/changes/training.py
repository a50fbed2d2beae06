"""Steps are trained, checkpointed, evaluated, and rolled back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

from relax_hpc.transfer_queue.controller.changes.leases import consume
from relax_hpc.transfer_queue.controller.changes.prompt_groups import detach, drop, leave_place, reopen, withdraw
from relax_hpc.transfer_queue.controller.changes.segments import lose_rolled_back, lose_stale
from relax_hpc.transfer_queue.controller.registry import applies
from relax_hpc.transfer_queue.controller.state.task_queues import DONE
from relax_hpc.transfer_queue.controller.topics import ADMISSION, ALL
from relax_hpc.transfer_queue.records import NO_STEP, PromptGroup
from relax_hpc.versions import Version

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.controller.state.queue_state import QueueState


@applies("trained")
def train(state: QueueState, step: int, leases: list[int]) -> None:
    for lease in leases:
        consume(state, lease)
    state.progress.trained_steps = step + 1
    tickets = state.tickets_of(step)
    state.tickets.end_wait(tickets, state.groups.rows_of(tickets))
    for number, count in state.groups.shards_of(tickets).items():
        state.shards.count_untrained(number, -count)
    state.tell_rows("trained", tickets, str(Version(state.lineage.incarnation, step)), step)
    state.woken.add(ADMISSION)
    lose_stale(state)


@applies("evaluated")
def evaluate(state: QueueState, version: int) -> None:
    state.progress.evaluated = max(state.progress.evaluated, version)
    state.woken.add(ALL)


@applies("checkpoint")
def save_checkpoint(state: QueueState, step: int, incarnation: int, name: str, digest: str) -> None:
    point = {"step": step, "incarnation": incarnation, "name": name, "digest": digest}
    state.progress.checkpoints.append(point)
    _retire(state, (step - state.plan.keep_steps) * state.plan.prompts_per_step)
    state.woken.add(ALL)


def _retire(state: QueueState, end: int) -> None:
    """Forget prompt groups whose place in the order of training is lower than ``end``."""
    order, in_sets = state.order, state.tasks.in_sets
    places = range(order.first, end)
    gone: Iterable[int] = order.between(places.start, max(places.start, end)) if in_sets else places
    for _, run in groupby(gone, lambda ticket: ticket in state.tickets.untrained):
        if tickets := [ticket for ticket in run if ticket in state.groups]:
            detach(state, tickets)
            for ticket in tickets:
                state.tickets.reissued.discard(ticket)
                state.media.release(ticket)
                del state.groups[ticket]
    order.first = max(order.first, end)
    below = min(state.groups, default=state.tickets.next) if in_sets else end
    for queue in state.tasks.values():
        queue.forget(below)


@applies("resume")
def resume(state: QueueState, incarnation: int, step: int) -> None:
    """Training goes on at ``step``: what was made of it and of later ones, by weights that are gone, is undone."""
    state.lineage.resume(incarnation, step)
    state.device_turns.rested.clear()
    state.progress.resume(step)
    first, in_sets = step * state.plan.prompts_per_step, state.tasks.in_sets
    state.tickets.next = max(state.tickets.next, first)
    state.order.first = min(state.order.first, first)
    undone: Sequence[int] = _cut_order(state, first) if in_sets else range(first, state.tickets.next)
    for ticket in undone:
        if ticket in state.groups:
            _roll_back(state, ticket, state.groups[ticket])
        else:
            state.groups[ticket] = PromptGroup(None)
            drop(state, ticket, "retired")
    lose_rolled_back(state)
    for queue in state.tasks.values():
        queue.rewind(min(undone, default=state.tickets.next) if in_sets else first)
    state.woken.add(ALL)


def _cut_order(state: QueueState, first: int) -> list[int]:
    """Forget the order of training from place ``first`` on; all admitted tickets that were not trained before."""
    places, groups, admitted = state.order.tickets, state.groups, state.tickets.next
    again = state.order.between(first)
    for ticket in filter(groups.__contains__, again):
        groups[ticket].place = NO_STEP
    del places[first:]
    waiting = {ticket for ticket, group in groups.items() if group.place == NO_STEP}
    # Who resumes behind all that the queue knows was trained on tickets that it does not know.
    unknown = (ticket for ticket in range(admitted) if ticket not in waiting)
    places.extend(islice(unknown, len(places), first) if len(places) < first else ())
    return sorted(waiting.union(again))


def _roll_back(state: QueueState, ticket: int, group: PromptGroup) -> None:
    """After the lineage changed: drop what rolled-back weights made, give the rest back to the actor."""
    if not state.lineage.origin(tuple(group.versions))[0]:
        drop(state, ticket, "rolled_back")
        return
    latest = state.progress.trained_steps + state.plan.max_staleness
    if group.owner and state.plan.step_of(ticket) <= latest:
        # Whoever goes on with it may do so by the version that was resumed from.
        group.last = min(group.last, latest)
    if state.tasks["actor"].statuses[ticket] == DONE:
        _untrain(state, ticket)
    if group.old_version and not state.lineage.origin((group.old_version,))[0]:
        for part in [part for part in group.parts if state.bits.of(part[1]) & state.scored]:
            withdraw(state, ticket, part)


def _untrain(state: QueueState, ticket: int) -> None:
    """What the actor has made of it is undone."""
    for number, _ in state.groups[ticket].parts:
        state.shards.count_untrained(number, 1)
    state.tickets.wait([ticket], state.groups[ticket].rows)
    leave_place(state, ticket)
    reopen(state, "actor", ticket)
    state.events.tell("returned", [ticket])
