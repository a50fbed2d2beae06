"""Changes of steps: they are trained, checkpointed, evaluated, and rolled back.

A trainer that comes back goes on where the newest whole checkpoint ends. It is the policy that
versions and rows are made by: where it goes back, rows of later versions are gone, and every other
trainer that is beyond that step goes back with it, by an end of its incarnation. Where another one
goes back, the rows are still there: it gets them again, under the same steps, and nobody else has
to undo anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

from relax_hpc.base.versions import Version
from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.changes.leases import consume, release
from relax_hpc.queue.controller.changes.members import end
from relax_hpc.queue.controller.changes.prompt_groups import (
    detach,
    drop,
    leave_place,
    reopen,
    withdraw,
)
from relax_hpc.queue.controller.changes.segments import lose_rolled_back, lose_stale
from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.task_queues import DONE
from relax_hpc.queue.controller.topics import ADMISSION, ALL
from relax_hpc.queue.records import NO_STEP, PromptGroup

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@applies("trained")
def train(state: QueueState, task: str, step: int, leases: list[int], save_at: int = 0) -> None:
    """``save_at``: step of a checkpoint that is due by time; 0: none. See `SaveClock`."""
    if save_at:
        state.progress.timed_saves.append(save_at)
    for lease in leases:
        consume(state, lease)
    for done in state.progress.train(task, step):
        tickets = state.tickets_of(done)
        state.tickets.end_wait(tickets, state.groups.rows_of(tickets))
        for number, count in state.groups.shards_of(tickets).items():
            state.shards.count_untrained(number, -count)
        state.tell_rows("trained", tickets, str(Version(state.lineage.incarnation, done)), done)
    state.woken.add(ADMISSION)
    lose_stale(state)


@applies("evaluated")
def evaluate(state: QueueState, version: int) -> None:
    state.progress.evaluated = max(state.progress.evaluated, version)
    state.woken.add(ALL)


@applies("checkpoint")
def save_checkpoint(
    state: QueueState, task: str, step: int, incarnation: int, name: str, digest: str
) -> None:
    part = {"incarnation": incarnation, "name": name, "digest": digest}
    if state.progress.save(step, task, part):
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
def resume(state: QueueState, task: str, incarnation: int, step: int) -> None:
    """Let a trainer go on at ``step``."""
    state.progress.incarnations[task] = incarnation
    if task == POLICY:
        _take_all_back(state, incarnation, step)
    else:
        _train_again(state, task, step)


def _train_again(state: QueueState, task: str, step: int) -> None:
    """A trainer that is not the policy gets the rows of ``step`` and later ones once more."""
    first, queue = step * state.plan.prompts_per_step, state.tasks[task]
    state.progress.trained[task] = step
    again = state.order.between(first) if queue.in_sets else range(first, state.tickets.next)
    for ticket in [
        ticket for ticket in again if ticket in state.groups and queue.statuses[ticket] == DONE
    ]:
        _count_as_untrained(state, ticket)
        reopen(state, task, ticket)
    if not queue.in_sets:
        queue.rewind(first)
    if first < state.order.first:
        # The rows are gone: they have to be drawn once more, for all trainers.
        state.progress.forget_after(step)
        _end_life(state, POLICY)
    state.woken.add(ALL)


def _end_life(state: QueueState, task: str) -> None:
    """A trainer has to go back: its incarnation, if it lives, may change nothing any more."""
    owner = state.plan.trainers[task], state.progress.incarnations.get(task, 0)
    if not state.members.lowest_allowed(owner):
        end(state, *owner)


def _take_all_back(state: QueueState, incarnation: int, step: int) -> None:
    """Training goes on at ``step``: what was made of it and of later ones, by weights that are
    gone, is undone."""
    others = [task for task in state.plan.trainers if task != POLICY]
    for task in [task for task in others if state.progress.trained[task] > step]:
        _end_life(state, task)
    for lease in state.leases.of_tasks(others):
        release(state, lease)
    state.lineage.resume(incarnation, step)
    state.device_turns.rested.clear()
    state.progress.resume(step)
    first, in_sets = step * state.plan.prompts_per_step, state.tasks.in_sets
    state.tickets.next = max(state.tickets.next, first)
    state.order.first = min(state.order.first, first)
    undone: Sequence[int] = (
        _cut_order(state, first) if in_sets else range(first, state.tickets.next)
    )
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
    """Forget the order of training from place ``first`` on; all admitted tickets that were not
    trained before."""
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
    """Drop what rolled-back weights made, after the lineage changed, and give the rest back to the
    trainers."""
    if not state.lineage.origin(tuple(group.versions))[0]:
        drop(state, ticket, "rolled_back")
        return
    latest = state.progress.trained_steps + state.plan.max_staleness
    if group.owner and state.plan.step_of(ticket) <= latest:
        # Whoever goes on with it may do so by the version that was resumed from.
        group.last = min(group.last, latest)
    for task in [
        task for task in state.plan.trainers if state.tasks[task].statuses[ticket] == DONE
    ]:
        _count_as_untrained(state, ticket)
        leave_place(state, ticket)
        reopen(state, task, ticket)
    if group.old_version and not state.lineage.origin((group.old_version,))[0]:
        for part in [part for part in group.parts if state.bits.of(part[1]) & state.scored]:
            withdraw(state, ticket, part)


def _count_as_untrained(state: QueueState, ticket: int) -> None:
    """Count the prompt group as waiting for training again: what a trainer has made of it is about
    to be undone."""
    if state.is_trained(ticket):
        for number, _ in state.groups[ticket].parts:
            state.shards.count_untrained(number, 1)
        state.tickets.wait([ticket], state.groups[ticket].rows)
        state.events.tell("returned", [ticket])
