"""Progress of a run: trained steps and their order, checkpoints, evaluations.

A step is trained when all trainers have trained it. A checkpoint is complete when each trainer has
saved its part.

A trainer that restarts resumes at the newest complete checkpoint. Versions and rows come from the
policy. If the policy resumes at an earlier step, rows of later versions are dropped, and the
incarnation of every other trainer beyond that step is ended, so that it resumes there too. If
another trainer resumes at an earlier step, the rows still exist: it receives them again under the
same steps, and no other role has to undo anything. If it then ends and resumes at a later step, its
checkpoint has been trained on the rows of the steps between: they count as trained by it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from relax_hpc.base.versions import Version
from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.leases import consume, release
from relax_hpc.queue.controller.state.members import end_incarnation
from relax_hpc.queue.controller.state.prompt_groups import (
    detach,
    drop,
    leave_position,
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
class TrainingOrder:
    """Positions in the order of training: step t trains those from t x prompts_per_step on. If
    steps have no sets, positions are tickets, and `tickets` is not used."""

    tickets: array[int] = field(default_factory=lambda: array("q"))
    """Tickets by position; NO_STEP for a free position."""
    first: int = 0
    """The lowest position that is not retired."""

    def assign(self, start: int, ticket: int) -> int:
        """Give ``ticket`` the first free position from ``start`` on; that position."""
        position = start
        while position < len(self.tickets) and self.tickets[position] != NO_STEP:
            position += 1
        self.tickets.extend([NO_STEP] * (position + 1 - len(self.tickets)))
        self.tickets[position] = ticket
        return position

    def clear(self, position: int) -> None:
        self.tickets[position] = NO_STEP

    def between(self, first: int, end: int | None = None) -> list[int]:
        """The tickets at these positions, without free ones."""
        return [ticket for ticket in self.tickets[first:end] if ticket != NO_STEP]

    def dump(self) -> Any:
        return self.tickets.tobytes(), self.first

    def load(self, values: Any) -> None:
        self.tickets = array("q", values[0])
        self.first = values[1]


@dataclass(slots=True)
class Progress:
    """Progress of the trainers."""

    plan: Plan = field(compare=False)
    trained: dict[str, int] = field(default_factory=dict)
    """Steps trained, by trainer."""
    incarnations: dict[str, int] = field(default_factory=dict)
    """Incarnation that resumed last, by trainer."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Checkpoints, the latest last: the step of each, and its parts (incarnation, name and digest)
    by trainer. Incomplete ones are kept only if they are later than all complete ones."""
    evaluated: int = -1
    """The highest evaluated version."""
    gathered: int = 0
    """The lowest step whose rows may still have to be gathered into a file."""
    timed_saves: list[int] = field(default_factory=list)
    """Steps of checkpoints that are due because `checkpoint.every_s` has passed, without those up
    to the newest complete checkpoint."""

    def __post_init__(self) -> None:
        self.trained = dict.fromkeys(self.plan.trainers, 0)

    @property
    def trained_steps(self) -> int:
        """Steps that all trainers have trained."""
        return min(self.trained.values())

    @property
    def furthest(self) -> int:
        """Steps trained by the trainer that has trained the most."""
        return max(self.trained.values())

    @property
    def complete_steps(self) -> list[int]:
        """Steps of the complete checkpoints, from which trainers can resume, ascending."""
        trainers = self.plan.trainers.keys()
        return [point["step"] for point in self.checkpoints if trainers <= point["parts"].keys()]

    def parts(self, task: str) -> list[dict[str, Any]]:
        """Parts that the trainer has saved, with the step of each, and whether all other trainers
        have saved theirs."""
        complete = set(self.complete_steps)
        parts = []
        for point in self.checkpoints:
            if task in point["parts"]:
                step = point["step"]
                parts.append({"step": step, **point["parts"][task], "whole": step in complete})
        return parts

    @property
    def covered_steps(self) -> int:
        """Steps that a checkpoint covers."""
        return min(max(self.complete_steps, default=0), self.trained_steps)

    def finished(self) -> bool:
        """Whether every step is trained and the last weights are saved, and evaluated if the plan
        evaluates."""
        steps = self.plan.steps
        if self.trained_steps < steps or (self.plan.eval_every and self.evaluated < steps):
            return False
        return any(step >= steps for step in self.complete_steps)

    def train(self, task: str, step: int) -> range:
        """Record that the trainer has trained ``step``; the steps that all trainers have trained
        now, but had not before."""
        before = self.trained_steps
        self.trained[task] = step + 1
        return range(min(before, step), self.trained_steps)

    def save(self, step: int, task: str, part: dict[str, Any]) -> bool:
        """Record the trainer's part of the checkpoint of ``step``; whether the checkpoint is now
        complete."""
        parts = {point["step"]: point["parts"] for point in self.checkpoints}
        parts[step] = parts.get(step, {}) | {task: part}
        self.checkpoints = [{"step": at, "parts": parts[at]} for at in sorted(parts)]
        complete = self.complete_steps
        newest = max(complete, default=0)
        self.checkpoints = [
            point
            for point in self.checkpoints
            if point["step"] in complete or point["step"] > newest
        ]
        self.timed_saves = [at for at in self.timed_saves if at > newest]
        return step in complete

    def resume(self, step: int) -> None:
        """Return to ``step``: forget all progress at this step and later, of all trainers."""
        self.trained = {task: min(steps, step) for task, steps in self.trained.items()}
        self.trained[POLICY] = step
        self.evaluated = min(self.evaluated, step)
        self.gathered = min(self.gathered, step)
        self.forget_after(step)

    def forget_after(self, step: int) -> None:
        """Forget later checkpoints, from which no trainer can resume any more."""
        self.checkpoints = [point for point in self.checkpoints if point["step"] <= step]

    def dump(self) -> Any:
        counts = self.evaluated, self.gathered
        return self.trained, self.incarnations, self.checkpoints, *counts, self.timed_saves

    def load(self, values: Any) -> None:
        self.trained, self.incarnations, self.checkpoints, *counts, self.timed_saves = values
        self.evaluated, self.gathered = counts


@applies("trained")
def train(state: QueueState, task: str, step: int, leases: list[int], save_at: int = 0) -> None:
    """``save_at``: step of a checkpoint that is due by time; 0: none is. See `SaveClock`."""
    if save_at:
        state.progress.timed_saves.append(save_at)
    for lease in leases:
        consume(state, lease)
    _finish_steps(state, state.progress.train(task, step))


def _finish_steps(state: QueueState, steps: range) -> None:
    """End the wait of the rows of ``steps``, which all trainers have trained now."""
    for trained_step in steps:
        tickets = _known_tickets(state, trained_step)
        state.tickets.end_wait(tickets, state.groups.rows_of(tickets))
        for number, count in state.groups.shards_of(tickets).items():
            state.shards.count_untrained(number, -count)
        version = str(Version(state.lineage.incarnation, trained_step))
        state.add_row_events("trained", tickets, version, trained_step)
    state.woken.add(ADMISSION)
    lose_stale(state)


def _known_tickets(state: QueueState, step: int) -> list[int]:
    """Tickets that ``step`` trains, without retired ones."""
    return [ticket for ticket in state.tickets_of(step) if ticket in state.groups]


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
        # A trainer that has resumed before this checkpoint still needs the rows from there on.
        end = min(step - state.plan.keep_steps, state.progress.trained_steps)
        _retire(state, end * state.plan.prompts_per_step)
    state.woken.add(ALL)


def _retire(state: QueueState, end: int) -> None:
    """Forget prompt groups whose position in the order of training is lower than ``end``."""
    order, in_sets = state.order, state.tasks.in_sets
    positions = range(order.first, end)
    retired: Iterable[int] = positions
    if in_sets:
        retired = order.between(order.first, max(order.first, end))
    for _, run in groupby(retired, lambda ticket: ticket in state.tickets.untrained):
        tickets = [ticket for ticket in run if ticket in state.groups]
        if tickets:
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
    """A trainer resumes at ``step``."""
    state.progress.incarnations[task] = incarnation
    if task == POLICY:
        _resume_policy(state, incarnation, step)
    else:
        _resume_other_trainer(state, task, step)


def _resume_other_trainer(state: QueueState, task: str, step: int) -> None:
    """A trainer that is not the policy's gets the rows of ``step`` and later steps again."""
    first, queue = step * state.plan.prompts_per_step, state.tasks[task]
    _skip_steps(state, task, step)
    state.progress.trained[task] = step
    tickets = state.order.between(first) if queue.in_sets else range(first, state.tickets.next)
    for ticket in tickets:
        if ticket in state.groups and queue.statuses[ticket] == DONE:
            _count_as_untrained(state, ticket)
            reopen(state, task, ticket)
    if not queue.in_sets:
        queue.rewind(first)
    if first < state.order.first:
        # Rows of the step are retired. They must be generated again for all trainers, so the policy
        # has to resume at this step too.
        state.progress.forget_after(step)
        _end_trainer(state, POLICY)
    state.woken.add(ALL)


def _skip_steps(state: QueueState, task: str, end: int) -> None:
    """Count the steps before ``end`` that ``task`` was about to train again as trained by it: the
    complete checkpoint from which it resumes was saved after it had trained them."""
    steps = range(state.progress.trained[task], end)
    if not steps:
        return
    for step in steps:
        for ticket in _known_tickets(state, step):
            state.tasks[task].statuses[ticket] = DONE
    _finish_steps(state, state.progress.train(task, end - 1))


def _end_trainer(state: QueueState, task: str) -> None:
    """End the incarnation of a trainer, if it still lives, so that a new one resumes earlier."""
    owner = state.plan.trainers[task], state.progress.incarnations.get(task, 0)
    if not state.members.lowest_allowed(owner):
        end_incarnation(state, *owner)


def _resume_policy(state: QueueState, incarnation: int, step: int) -> None:
    """The policy resumes at ``step``: undo what rolled-back weights have made, and everything that
    was done for this step and later ones."""
    other_trainers = [task for task in state.plan.trainers if task != POLICY]
    for task in other_trainers:
        if state.progress.trained[task] > step:
            _end_trainer(state, task)
    for lease in state.leases.held_by_tasks(other_trainers):
        release(state, lease)
    state.lineage.resume(incarnation, step)
    state.device_turns.freed_after.clear()
    state.progress.resume(step)
    first, in_sets = step * state.plan.prompts_per_step, state.tasks.in_sets
    state.tickets.next = max(state.tickets.next, first)
    state.order.first = min(state.order.first, first)
    undone: Sequence[int] = range(first, state.tickets.next)
    if in_sets:
        undone = _cut_order(state, first)
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
    """Forget the order of training from position ``first`` on; all admitted tickets that were not
    trained before it."""
    positions, groups, admitted = state.order.tickets, state.groups, state.tickets.next
    removed = state.order.between(first)
    for ticket in removed:
        if ticket in groups:
            groups[ticket].position = NO_STEP
    del positions[first:]
    waiting = {ticket for ticket, group in groups.items() if group.position == NO_STEP}
    # If the policy resumes later than all that the journal contains, steps before were trained on
    # tickets that are unknown. Other tickets take their positions.
    unknown = (ticket for ticket in range(admitted) if ticket not in waiting)
    if len(positions) < first:
        positions.extend(islice(unknown, len(positions), first))
    return sorted(waiting.union(removed))


def _roll_back(state: QueueState, ticket: int, group: PromptGroup) -> None:
    """After a change of the lineage: drop what rolled-back weights have made, and offer the rest to
    the trainers again."""
    if not state.lineage.origin(tuple(group.versions))[0]:
        drop(state, ticket, "rolled_back")
        return
    latest = state.progress.trained_steps + state.plan.max_staleness
    if group.owner and state.plan.step_of(ticket) <= latest:
        # The owner may continue it with the version from which the policy resumed.
        group.last_step = min(group.last_step, latest)
    for task in state.plan.trainers:
        if state.tasks[task].statuses[ticket] == DONE:
            _count_as_untrained(state, ticket)
            leave_position(state, ticket)
            reopen(state, task, ticket)
    if group.old_version and not state.lineage.origin((group.old_version,))[0]:
        scores = [
            shard_fields
            for shard_fields in group.parts
            if state.bits.mask(shard_fields[1]) & state.scored
        ]
        for shard_fields in scores:
            withdraw(state, ticket, shard_fields)


def _count_as_untrained(state: QueueState, ticket: int) -> None:
    """Count the prompt group as waiting for training again, before a trainer's work on it is
    undone."""
    if state.is_trained(ticket):
        for number, _ in state.groups[ticket].parts:
            state.shards.count_untrained(number, 1)
        state.tickets.wait([ticket], state.groups[ticket].rows)
        state.events.add("returned", [ticket])
