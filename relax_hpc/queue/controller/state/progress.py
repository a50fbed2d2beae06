"""Progress of a run: steps trained, checkpoints, evaluations.

A step is trained when all trainers have trained it. A checkpoint is complete when each trainer has
saved its part.

A trainer that restarts resumes at the newest complete checkpoint. Versions and rows come from the
policy. If the policy resumes at an earlier step, rows of later versions are dropped, and the
incarnation of every other trainer beyond that step is ended, so that it resumes there too. If
another trainer resumes at an earlier step, the rows still exist: it receives them again under the
same steps, and no other role has to undo anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from relax_hpc.base.versions import Version
from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.leases import consume, release
from relax_hpc.queue.controller.state.members import end
from relax_hpc.queue.controller.state.prompt_groups import (
    detach,
    drop,
    leave_place,
    reopen,
    withdraw,
)
from relax_hpc.queue.controller.state.segments import lose_rolled_back, lose_stale
from relax_hpc.queue.controller.state.task_queues import DONE
from relax_hpc.queue.controller.topics import ADMISSION, ALL
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import NO_STEP, PromptGroup

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@dataclass(slots=True)
class Progress:
    """Progress of the trainers."""

    plan: Plan = field(compare=False)
    trained: dict[str, int] = field(default_factory=dict)
    """Steps trained, by trainer."""
    incarnations: dict[str, int] = field(default_factory=dict)
    """Incarnation that went on last, by trainer."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Checkpoints, the latest last: the step of each, and its parts (incarnation, name and digest)
    by trainer. One that lacks a part is later than all whole ones."""
    evaluated: int = -1
    """The highest version that was evaluated."""
    gathered: int = 0
    """The lowest step whose rows may be left to be gathered into a file."""
    timed_saves: list[int] = field(default_factory=list)
    """Steps of checkpoints that are made because `checkpoint.every_s` is over; not those that the
    newest whole one follows."""

    def __post_init__(self) -> None:
        self.trained = dict.fromkeys(self.plan.trainers, 0)

    @property
    def trained_steps(self) -> int:
        """Steps that all trainers have trained."""
        return min(self.trained.values())

    @property
    def furthest(self) -> int:
        """Steps trained by the trainer that is ahead of the others."""
        return max(self.trained.values())

    @property
    def whole(self) -> list[int]:
        """Steps of the checkpoints that may be resumed from, ascending."""
        return [
            point["step"]
            for point in self.checkpoints
            if self.plan.trainers.keys() <= point["parts"].keys()
        ]

    def parts(self, task: str) -> list[dict[str, Any]]:
        """Parts that the trainer has saved, each with its step, and whether all others have saved
        theirs."""
        whole = set(self.whole)
        found = [
            (point["step"], point["parts"][task])
            for point in self.checkpoints
            if task in point["parts"]
        ]
        return [{"step": step, **part, "whole": step in whole} for step, part in found]

    @property
    def covered_steps(self) -> int:
        """Steps that a checkpoint covers."""
        return min(max(self.whole, default=0), self.trained_steps)

    def finished(self) -> bool:
        """Every step is trained, the last weights are saved, and evaluated if evaluation is on."""
        steps = self.plan.steps
        if self.trained_steps < steps or (self.plan.eval_every and self.evaluated < steps):
            return False
        return any(step >= steps for step in self.whole)

    def train(self, task: str, step: int) -> range:
        """The trainer has trained ``step``; the steps that all have trained now, and had not
        before."""
        before = self.trained_steps
        self.trained[task] = step + 1
        return range(min(before, step), self.trained_steps)

    def save(self, step: int, task: str, part: dict[str, Any]) -> bool:
        """The trainer has its part of the checkpoint of ``step``; whether that is whole now."""
        parts = {point["step"]: point["parts"] for point in self.checkpoints}
        parts[step] = parts.get(step, {}) | {task: part}
        self.checkpoints = [{"step": at, "parts": parts[at]} for at in sorted(parts)]
        whole = self.whole
        newest = max(whole, default=0)
        self.checkpoints = [p for p in self.checkpoints if p["step"] in whole or p["step"] > newest]
        self.timed_saves = [at for at in self.timed_saves if at > newest]
        return step in whole

    def resume(self, step: int) -> None:
        """Go back to ``step``: what was done at it and later counts no more, whoever did it."""
        self.trained = {task: min(steps, step) for task, steps in self.trained.items()} | {
            POLICY: step
        }
        self.evaluated = min(self.evaluated, step)
        self.gathered = min(self.gathered, step)
        self.forget_after(step)

    def forget_after(self, step: int) -> None:
        """Forget later checkpoints: nobody resumes from them."""
        self.checkpoints = [point for point in self.checkpoints if point["step"] <= step]

    def dump(self) -> Any:
        counts = self.evaluated, self.gathered
        return self.trained, self.incarnations, self.checkpoints, *counts, self.timed_saves

    def load(self, values: Any) -> None:
        self.trained, self.incarnations, self.checkpoints, *counts, self.timed_saves = values
        self.evaluated, self.gathered = counts


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
        groups[ticket].position = NO_STEP
    del places[first:]
    waiting = {ticket for ticket, group in groups.items() if group.position == NO_STEP}
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
        for part in [part for part in group.parts if state.bits.mask(part[1]) & state.scored]:
            withdraw(state, ticket, part)


def _count_as_untrained(state: QueueState, ticket: int) -> None:
    """Count the prompt group as waiting for training again: what a trainer has made of it is about
    to be undone."""
    if state.is_trained(ticket):
        for number, _ in state.groups[ticket].parts:
            state.shards.count_untrained(number, 1)
        state.tickets.wait([ticket], state.groups[ticket].rows)
        state.events.tell("returned", [ticket])
