"""One to three trainers that die, save and resume in any order.

All parts of a checkpoint must be of the same step and have learned from the same rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.messages import Refused
from relax_hpc.queue.controller.state.progress import Progress
from relax_hpc.queue.plan import GENERATED, Plan
from relax_hpc.queue.row_ids import row_ids
from tests.helpers.checked_queue import GROUPS
from tests.helpers.queue_helpers import small
from tests.helpers.queue_in_memory import contents
from tests.helpers.queue_world import World
from tests.queue.queue_machine import WorldMachine, searched

LEARNERS = ("critic", "teacher")
History = tuple[frozenset[int], ...]
"""By step: the rows that the weights were trained on."""


@dataclass
class Learner:
    """The memory of a trainer's process. The rows that it has learned from stand for its weights."""

    step: int = -1
    leases: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    settled: int = 0
    """Number of tickets in `held` whose mini-batches have changed the weights."""
    due: bool = False


class TrainersWorld(World):
    """`World` with more trainers than the actor: ``learners``, which do not publish weights."""

    def __init__(self, plan: Plan, learners: tuple[str, ...], **options: Any) -> None:
        self.learners = {role: Learner() for role in learners}
        self.learned: dict[str, History] = {}
        self.saved: dict[str, History] = {}
        """By the name of a trainer's part of a checkpoint."""
        self.rows_of: dict[int, frozenset[int]] = {}
        """By lease."""
        self.drawn = itertools.count()
        super().__init__(plan, **options)
        self.incarnations |= dict.fromkeys(learners, 1)
        self.unsaved |= {role: [] for role in learners}

    def ask(self, role: str, op: str, /, **args: Any) -> Any:
        return self.ask_as(GROUPS.get(role, role), self.incarnations[role], op, **args)

    def kill(self, role: str, noticed: bool) -> None:
        if role not in self.learners:
            super().kill(role, noticed)
            return
        if noticed:
            self.ask_as("supervisor", 1, "down", group=role, incarnation=self.incarnations[role])
        self.incarnations[role] += 1
        self.learners[role] = Learner()

    def put(
        self, role: str, rows: dict, fields: tuple[str, ...], *args: Any, **options: Any
    ) -> dict[int, str]:
        """Put rows. Each generated row gets a new number."""
        if fields == GENERATED:
            for row in rows.values():
                row["drawn"] = next(self.drawn)
        return super().put(role, rows, fields, *args, **options)

    def act(self, role: str, choice: int = 0) -> bool:
        """Let ``role`` do one thing. If a request is refused, the role restarts."""
        try:
            if role in self.learners:
                return self.act_learner(role, choice)
            return super().act(role, choice)
        except Refused as refused:
            assert self.learners and "malformed" not in str(refused), refused
            self.kill(role, choice % 2 == 0)
            return True

    # -- rows that each trainer has learned from ---------------------------------------------------

    def act_actor(self, choice: int) -> bool:
        before, leases = self.step, list(self.leases)
        moved = super().act_actor(choice)
        if self.announced and self.step == before + 1:
            self.learn("actor", before, leases)
        return moved

    def resume(self) -> bool:
        self.step, self.older = self.from_checkpoint("actor", self.older), 0
        version = str(Version(self.incarnations["actor"], self.step))
        self.ask("actor", "publish", version=version, digest="d")
        return True

    def window(self, step: int) -> dict[str, Any] | None:
        claim = super().window(step)
        if claim:
            self.note(claim)
        return claim

    def save_or_continue(self) -> bool:
        moved = super().save_or_continue()
        self.saved[f"{self.incarnations['actor']}-{self.step}"] = self.learned["actor"]
        return moved

    def note(self, claim: dict[str, Any]) -> None:
        self.rows_of[claim["lease"]] = frozenset(row["drawn"] for row in self.rows(claim).values())

    def learn(self, role: str, step: int, leases: list[int]) -> None:
        rows = frozenset().union(*(self.rows_of[lease] for lease in leases))
        assert len(self.learned[role]) == step and len(rows) == self.plan.prompts_per_step
        self.learned[role] += (rows,)

    def from_checkpoint(self, role: str, older: int) -> int:
        """Resume from the newest complete checkpoint, or from one that is ``older`` ones before."""
        points = [
            point
            for point in self.ask(role, "checkpoints", task=role)["checkpoints"]
            if point["whole"]
        ]
        steps = [0, *(point["step"] for point in points)]
        step = steps[max(0, len(steps) - 1 - older)]
        names = {point["step"]: point["name"] for point in points}
        self.ask(role, "resume", task=role, step=step)
        self.learned[role] = self.saved[names[step]] if step else ()
        return step

    def check_cuts(self) -> None:
        """Check that all parts of a complete checkpoint have learned from the same rows."""
        progress = self.service.state.progress
        for point in progress.checkpoints:
            names = [saved["name"] for saved in point["parts"].values()]
            if point["step"] in progress.complete_steps:
                assert len({self.saved[name] for name in names}) == 1, point
                assert {len(self.saved[name]) for name in names} == {point["step"]}

    # -- trainers other than the actor -------------------------------------------------------------

    def act_learner(self, role: str, choice: int) -> bool:
        learner = self.learners[role]
        if learner.step < 0:
            learner.step = self.from_checkpoint(role, int(choice == 13))
            return True
        if learner.due:
            learner.due = False
            if (
                learner.step % self.save_every == 0
                or learner.step == self.plan.steps
                or choice == 7
            ):
                self.save_part(role, learner.step)
            return True
        if learner.step >= self.plan.steps:
            # The trainer stays until all trainers have saved the last step.
            self.ask(role, "checkpoints", task=role)
            return False
        if len(learner.held) < self.plan.prompts_per_step and learner.settled == self.whole_batches(
            learner
        ):
            return self.take(role, learner, choice)
        if learner.settled < self.whole_batches(learner):
            return self.settle_batch(role, learner)
        if self.ask(role, "trained", task=role, step=learner.step, leases=learner.leases) is None:
            return False
        self.learn(role, learner.step, learner.leases)
        self.learners[role] = Learner(learner.step + 1, due=True)
        return True

    def whole_batches(self, learner: Learner) -> int:
        """Number of held tickets that fill whole mini-batches."""
        size = self.plan.prompts_per_step // self.minis
        return len(learner.held) // size * size

    def save_part(self, role: str, step: int) -> None:
        name = f"{role}-{self.incarnations[role]}-{step}"
        self.saved[name] = self.learned[role]
        self.ask(role, "checkpoint", task=role, step=step, name=name, digest="d")

    def take(self, role: str, learner: Learner, choice: int) -> bool:
        boundary = self.plan.prompts_per_step // self.minis
        claim = self.ask(role, "claim", task=role, budget=self.budget, boundary=boundary)
        if claim is None or claim.get("finished"):
            return False
        if choice == 11:
            try:
                self.ask(
                    role,
                    "quarantine",
                    lease=claim["lease"],
                    tickets=claim["tickets"][:1],
                    reason="bad",
                )
            except Refused:
                """Another trainer has already trained on the row."""
            self.ask(role, "release", lease=claim["lease"])
            return True
        self.read(role, claim)
        self.note(claim)
        assert claim["step"] == learner.step
        learner.leases.append(claim["lease"])
        learner.held += claim["tickets"]
        return True

    def settle_batch(self, role: str, learner: Learner) -> bool:
        """Train on the last mini-batch if all of its rows are on disk. If not, release its leases."""
        done = [lease for lease in learner.leases if lease in self.rows_of]
        done = done[len(learner.leases) - self.unsettled_leases(learner) :]
        held = self.ask(role, "settled", leases=done)
        if held is None:
            return False
        if held["tickets"] == sorted(learner.held[learner.settled :]):
            learner.settled = len(learner.held)
            return True
        for lease in done:
            self.ask(role, "release", lease=lease)
        learner.leases, learner.held = (
            learner.leases[: len(learner.leases) - len(done)],
            learner.held[: learner.settled],
        )
        return True

    def unsettled_leases(self, learner: Learner) -> int:
        """Number of leases, counted from the last one, of the mini-batch that is not settled."""
        rows = len(learner.held) - learner.settled
        count = 0
        for lease in reversed(learner.leases):
            if rows <= 0:
                break
            rows, count = rows - len(self.rows_of[lease]), count + 1
        return count

    def go_to_the_end(self, rounds: int = 900) -> None:
        """Run without faults to the end. All trainers must have learned from the same rows."""
        for round_ in range(rounds):
            moved = [
                self.act(role, choice)
                for role, choice in itertools.product((*GROUPS, *self.learners), (0, 1, 2, 3))
            ]
            if self.service.state.progress.finished() and not any(moved):
                break
            assert any(moved), f"deadlock in round {round_}: {contents(self.service.state)}"
        assert self.service.state.progress.finished(), contents(self.service.state)
        assert len(set(self.learned.values())) == 1 and len(self.learned) == 1 + len(self.learners)
        assert {*self.status.values()} <= {"trained", "dropped"}
        self.check_cuts()


def trainers_plan(learners: tuple[str, ...], **settings: Any) -> Plan:
    """Plan of a run whose rows are trained by the actor and ``learners``."""
    plan = Plan.from_config(small(**settings))
    tasks = dict.fromkeys(learners, plan.tasks["actor"])
    trainers = {role: role for role in learners}
    return replace(
        plan,
        tasks=plan.tasks | tasks,
        trainers=plan.trainers | trainers,
        groups=plan.groups | trainers.keys(),
    )


class CutsMachine(WorldMachine):
    """Roles act, save and die in any order; then, without faults, all trainers reach the end."""

    world: TrainersWorld | None = None

    @initialize(
        learners=st.sampled_from([LEARNERS[:1], LEARNERS, ()]),
        staleness=st.integers(0, 3),
        shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
        budget=st.sampled_from([1, 14, 1000]),
        keep=st.integers(0, 2),
        save_every=st.integers(1, 3),
        max_rows=st.sampled_from([1, 4, 9, 1000]),
        slow_disk=st.booleans(),
    )
    def start(self, learners, staleness, shape, budget, keep, save_every, max_rows, slow_disk):
        plan = trainers_plan(
            learners, groups=shape[0], samples=2, steps=4, staleness=staleness, keep_steps=keep
        )
        options = {
            "budget": budget,
            "minis": shape[1],
            "save_every": save_every,
            "slow_disk": slow_disk,
        }
        self.world = TrainersWorld(replace(plan, max_rows=max_rows), learners, **options)

    @rule(choice=st.integers(0, 20), times=st.integers(1, 6), data=st.data())
    def act(self, choice, times, data):
        role = data.draw(st.sampled_from(sorted([*GROUPS, *self.world.learners])))
        for _ in range(times):
            self.world.act(role, choice)

    @rule(rounds=st.integers(1, 8))
    def all_act(self, rounds):
        for _, role in itertools.product(range(rounds), [*GROUPS, *self.world.learners]):
            self.world.act(role)

    @rule(noticed=st.booleans(), data=st.data())
    def kill_a_trainer(self, noticed, data):
        self.world.kill(data.draw(st.sampled_from(["actor", *self.world.learners])), noticed)

    @rule(number=st.integers(0, 9), noticed=st.booleans())
    def kill_a_trainer_after_steps_without_a_checkpoint(self, number, noticed):
        progress, roles = self.world.service.state.progress, ["actor", *self.world.learners]
        for _ in range(12):
            if progress.trained_steps > max(progress.complete_steps, default=0):
                break
            for role in (*GROUPS, *self.world.learners):
                self.world.act(role)
            progress = self.world.service.state.progress
        self.world.kill(roles[number % len(roles)], noticed)

    @invariant()
    def cuts_are_consistent(self):
        if self.world:
            self.world.check_cuts()


TestCutsMachine = CutsMachine.TestCase
TestCutsMachine.settings = searched(20, 400)


def with_critic(staleness: int, keep_steps: int) -> TrainersWorld:
    """A run with two trainers: the actor and a critic."""
    plan = trainers_plan(("critic",), staleness=staleness, keep_steps=keep_steps)
    return TrainersWorld(plan, ("critic",), budget=1000)


def act_until(world: TrainersWorld, is_reached: Callable[[Progress], bool], *waiting: str) -> None:
    """Let all roles but ``waiting`` act until ``is_reached`` is true for the progress."""
    for _, role in itertools.product(range(100), (*GROUPS, *world.learners)):
        if is_reached(world.service.state.progress):
            return
        if role not in waiting:
            world.act(role)
    raise AssertionError("the progress was not reached")


def statuses_of(world: TrainersWorld, step: int) -> set[str]:
    """The newest status of the rows that ``step`` trains."""
    names = list[str]()
    for ticket in world.service.state.tickets_of(step):
        names += row_ids(ticket, world.declared[ticket])
    return {world.status[name] for name in names}


@pytest.mark.parametrize("staleness", [0, 2])
def test_rows_before_the_resumed_checkpoint_count_as_trained(staleness):
    world = with_critic(staleness, keep_steps=2)
    act_until(world, lambda progress: progress.complete_steps == [1, 2])
    world.kill("critic", True)
    world.learners["critic"].step = world.from_checkpoint("critic", older=1)
    assert world.learners["critic"].step == 1 and statuses_of(world, 1) == {"accepted"}
    world.kill("critic", True)
    world.learners["critic"].step = world.from_checkpoint("critic", older=0)
    state = world.service.state
    assert world.learners["critic"].step == 2 and statuses_of(world, 1) == {"trained"}
    assert not any(ticket in state.tickets.untrained for ticket in state.tickets_of(1))
    assert all(state.is_trained(ticket) for ticket in state.tickets_of(1))
    assert contents(world.service.replayed()) == contents(state)
    world.go_to_the_end()


@pytest.mark.parametrize("staleness", [0, 2])
def test_rows_stay_for_a_trainer_that_resumed_before_a_complete_checkpoint(staleness):
    """The critic dies after it has saved step 2, and the actor saves it later: the checkpoint is
    complete, but the critic has resumed at step 1."""
    world = with_critic(staleness, keep_steps=0)
    act_until(world, lambda progress: progress.complete_steps == [1])
    act_until(world, lambda progress: progress.trained["actor"] == 2, "critic")
    act_until(world, lambda progress: len(progress.parts("critic")) == 2, "actor")
    world.kill("critic", True)
    world.learners["critic"].step = world.from_checkpoint("critic", older=0)
    act_until(world, lambda progress: progress.complete_steps == [1, 2], "critic")
    assert world.learners["critic"].step == 1 and statuses_of(world, 1) == {"accepted"}
    incarnation = world.incarnations["critic"]
    world.go_to_the_end()
    assert world.incarnations["critic"] == incarnation, "no request of the critic may be refused"
