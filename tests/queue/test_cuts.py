"""One to three trainers that die, save and come back in any order: every checkpoint is one cut over
all of them."""

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
from tests.helpers.queue_helpers import small
from tests.helpers.queue_world import GROUPS, World, contents
from tests.queue.queue_machine import WorldMachine, searched

OTHERS = ("critic", "teacher")
History = tuple[frozenset[int], ...]
"""By step, the rows that weights were made of."""


@dataclass
class Learner:
    """The memory of a trainer's process; its weights are what it has learned from."""

    step: int = -1
    leases: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    settled: int = 0
    """Of `held`, those of mini-batches that weights were changed by."""
    due: bool = False


class TrainersWorld(World):
    """`World` with ``others`` beside the actor, none of which publishes."""

    def __init__(self, plan: Plan, others: tuple[str, ...], **about: Any) -> None:
        self.others = {role: Learner() for role in others}
        self.learned: dict[str, History] = {}
        self.saved: dict[str, History] = {}
        """By the name of a part."""
        self.rows_of: dict[int, frozenset[int]] = {}
        """By lease."""
        self.drawn = itertools.count()
        super().__init__(plan, **about)
        self.incarnations |= dict.fromkeys(others, 1)
        self.unsaved |= {role: [] for role in others}

    def ask(self, role: str, op: str, /, **args: Any) -> Any:
        return self.ask_as(GROUPS.get(role, role), self.incarnations[role], op, **args)

    def kill(self, role: str, noticed: bool) -> None:
        if role not in self.others:
            super().kill(role, noticed)
            return
        if noticed:
            self.ask_as("supervisor", 1, "down", group=role, incarnation=self.incarnations[role])
        self.incarnations[role] += 1
        self.others[role] = Learner()

    def put(
        self, role: str, rows: dict, fields: tuple[str, ...], *about: Any, **more: Any
    ) -> dict[int, str]:
        """Rows that are drawn again are others."""
        if fields == GENERATED:
            for row in rows.values():
                row["drawn"] = next(self.drawn)
        return super().put(role, rows, fields, *about, **more)

    def act(self, role: str, choice: int = 0) -> bool:
        """Whoever is refused anything starts again."""
        try:
            return (
                self.act_other(role, choice) if role in self.others else super().act(role, choice)
            )
        except Refused as refused:
            assert self.others and "malformed" not in str(refused), refused
            self.kill(role, choice % 2 == 0)
            return True

    # -- what each has learned ---------------------------------------------------------------------

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

    def save_or_go_on(self) -> bool:
        moved = super().save_or_go_on()
        self.saved[f"{self.incarnations['actor']}-{self.step}"] = self.learned["actor"]
        return moved

    def note(self, claim: dict[str, Any]) -> None:
        self.rows_of[claim["lease"]] = frozenset(row["drawn"] for row in self.rows(claim).values())

    def learn(self, role: str, step: int, leases: list[int]) -> None:
        found = frozenset().union(*(self.rows_of[lease] for lease in leases))
        assert len(self.learned[role]) == step and len(found) == self.plan.prompts_per_step
        self.learned[role] += (found,)

    def from_checkpoint(self, role: str, older: int) -> int:
        """Go on where the newest whole one ends that this role's part of can be read."""
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
        """What the parts of a whole checkpoint have learned is the same."""
        progress = self.service.state.progress
        for point in progress.checkpoints:
            names = [part["name"] for part in point["parts"].values()]
            if point["step"] in progress.complete_steps:
                assert len({self.saved[name] for name in names}) == 1, point
                assert {len(self.saved[name]) for name in names} == {point["step"]}

    # -- trainers beside the actor -----------------------------------------------------------------

    def act_other(self, role: str, choice: int) -> bool:
        it = self.others[role]
        if it.step < 0:
            it.step = self.from_checkpoint(role, int(choice == 13))
            return True
        if it.due:
            it.due = False
            if it.step % self.save_every == 0 or it.step == self.plan.steps or choice == 7:
                self.save_part(role, it.step)
            return True
        if it.step >= self.plan.steps:
            # It stays until all have saved the last step.
            self.ask(role, "checkpoints", task=role)
            return False
        if len(it.held) < self.plan.prompts_per_step and it.settled == self.whole_batches(it):
            return self.take(role, it, choice)
        if it.settled < self.whole_batches(it):
            return self.settle_batch(role, it)
        if self.ask(role, "trained", task=role, step=it.step, leases=it.leases) is None:
            return False
        self.learn(role, it.step, it.leases)
        self.others[role] = Learner(it.step + 1, due=True)
        return True

    def whole_batches(self, it: Learner) -> int:
        size = self.plan.prompts_per_step // self.minis
        return len(it.held) // size * size

    def save_part(self, role: str, step: int) -> None:
        name = f"{role}-{self.incarnations[role]}-{step}"
        self.saved[name] = self.learned[role]
        self.ask(role, "checkpoint", task=role, step=step, name=name, digest="d")

    def take(self, role: str, it: Learner, choice: int) -> bool:
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
                """Somebody has trained on it."""
            self.ask(role, "release", lease=claim["lease"])
            return True
        self.read(role, claim)
        self.note(claim)
        assert claim["step"] == it.step
        it.leases.append(claim["lease"])
        it.held += claim["tickets"]
        return True

    def settle_batch(self, role: str, it: Learner) -> bool:
        """Change the weights, if all rows of the last mini-batch are sure to stay; else gather them
        again."""
        done = [lease for lease in it.leases if lease in self.rows_of][
            len(it.leases) - self.fresh(it) :
        ]
        held = self.ask(role, "settled", leases=done)
        if held is None:
            return False
        if held["tickets"] == sorted(it.held[it.settled :]):
            it.settled = len(it.held)
            return True
        for lease in done:
            self.ask(role, "release", lease=lease)
        it.leases, it.held = it.leases[: len(it.leases) - len(done)], it.held[: it.settled]
        return True

    def fresh(self, it: Learner) -> int:
        """How many leases, the last ones, are of the mini-batch that is not settled."""
        rows = len(it.held) - it.settled
        count = 0
        for lease in reversed(it.leases):
            if rows <= 0:
                break
            rows, count = rows - len(self.rows_of[lease]), count + 1
        return count

    def go_to_the_end(self, rounds: int = 900) -> None:
        """No more faults: the run must finish, and all have learned the same."""
        for round_ in range(rounds):
            moved = [
                self.act(role, choice)
                for role in (*GROUPS, *self.others)
                for choice in (0, 1, 2, 3)
            ]
            if self.service.state.progress.finished() and not any(moved):
                break
            assert any(moved), f"deadlock in round {round_}: {contents(self.service.state)}"
        assert self.service.state.progress.finished(), contents(self.service.state)
        assert len(set(self.learned.values())) == 1 and len(self.learned) == 1 + len(self.others)
        assert {*self.status.values()} <= {"trained", "dropped"}
        self.check_cuts()


def trainers_plan(others: tuple[str, ...], **about: Any) -> Plan:
    plan = Plan.from_config(small(**about))
    tasks, trainers = dict.fromkeys(others, plan.tasks["actor"]), {role: role for role in others}
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
        others=st.sampled_from([OTHERS[:1], OTHERS, ()]),
        staleness=st.integers(0, 3),
        shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
        budget=st.sampled_from([1, 14, 1000]),
        keep=st.integers(0, 2),
        save_every=st.integers(1, 3),
        max_rows=st.sampled_from([1, 4, 9, 1000]),
        slow_disk=st.booleans(),
    )
    def start(self, others, staleness, shape, budget, keep, save_every, max_rows, slow_disk):
        plan = trainers_plan(
            others, groups=shape[0], samples=2, steps=4, staleness=staleness, keep_steps=keep
        )
        about = {
            "budget": budget,
            "minis": shape[1],
            "save_every": save_every,
            "slow_disk": slow_disk,
        }
        self.world = TrainersWorld(replace(plan, max_rows=max_rows), others, **about)

    @rule(choice=st.integers(0, 20), times=st.integers(1, 6), data=st.data())
    def act(self, choice, times, data):
        role = data.draw(st.sampled_from(sorted([*GROUPS, *self.world.others])))
        for _ in range(times):
            self.world.act(role, choice)

    @rule(rounds=st.integers(1, 8))
    def all_act(self, rounds):
        for _, role in itertools.product(range(rounds), [*GROUPS, *self.world.others]):
            self.world.act(role)

    @rule(noticed=st.booleans(), data=st.data())
    def kill_a_trainer(self, noticed, data):
        self.world.kill(data.draw(st.sampled_from(["actor", *self.world.others])), noticed)

    @rule(who=st.integers(0, 9), noticed=st.booleans())
    def kill_a_trainer_when_all_are_beyond_the_last_cut(self, who, noticed):
        progress, roles = self.world.service.state.progress, ["actor", *self.world.others]
        for _ in range(12):
            if progress.trained_steps > max(progress.complete_steps, default=0):
                break
            for role in (*GROUPS, *self.world.others):
                self.world.act(role)
            progress = self.world.service.state.progress
        self.world.kill(roles[who % len(roles)], noticed)

    @invariant()
    def cuts_are_consistent(self):
        if self.world:
            self.world.check_cuts()


TestCutsMachine = CutsMachine.TestCase
TestCutsMachine.settings = searched(20, 400)


def with_critic(staleness: int, keep_steps: int) -> TrainersWorld:
    """A run whose steps both the actor and a critic train."""
    plan = trainers_plan(("critic",), staleness=staleness, keep_steps=keep_steps)
    return TrainersWorld(plan, ("critic",), budget=1000)


def act_until(it: TrainersWorld, is_reached: Callable[[Progress], bool], *waiting: str) -> None:
    """Let all roles but ``waiting`` act until the progress is as wanted."""
    for _, role in itertools.product(range(100), (*GROUPS, *it.others)):
        if is_reached(it.service.state.progress):
            return
        if role not in waiting:
            it.act(role)
    raise AssertionError("does not get there")


def statuses_of(it: TrainersWorld, step: int) -> set[str]:
    """What became last of the rows that ``step`` trains."""
    tickets = it.service.state.tickets_of(step)
    return {it.status[name] for t in tickets for name in row_ids(t, it.declared[t])}


@pytest.mark.parametrize("staleness", [0, 2])
def test_resume_later_again_counts_the_rows_between_as_trained(staleness):
    it = with_critic(staleness, keep_steps=2)
    act_until(it, lambda progress: progress.complete_steps == [1, 2])
    it.kill("critic", True)
    it.others["critic"].step = it.from_checkpoint("critic", older=1)
    assert it.others["critic"].step == 1 and statuses_of(it, 1) == {"accepted"}
    it.kill("critic", True)
    it.others["critic"].step = it.from_checkpoint("critic", older=0)
    state = it.service.state
    assert it.others["critic"].step == 2 and statuses_of(it, 1) == {"trained"}
    assert not any(ticket in state.tickets.untrained for ticket in state.tickets_of(1))
    assert all(state.is_trained(ticket) for ticket in state.tickets_of(1))
    assert contents(it.service.replayed()) == contents(state)
    it.go_to_the_end()


@pytest.mark.parametrize("staleness", [0, 2])
def test_rows_stay_until_a_trainer_that_resumed_before_a_complete_checkpoint_has_them(staleness):
    """The critic dies after it has saved step 2, and the actor saves it later: the checkpoint is
    complete, but the critic has resumed at step 1."""
    it = with_critic(staleness, keep_steps=0)
    act_until(it, lambda progress: progress.complete_steps == [1])
    act_until(it, lambda progress: progress.trained["actor"] == 2, "critic")
    act_until(it, lambda progress: len(progress.parts("critic")) == 2, "actor")
    it.kill("critic", True)
    it.others["critic"].step = it.from_checkpoint("critic", older=0)
    act_until(it, lambda progress: progress.complete_steps == [1, 2], "critic")
    assert it.others["critic"].step == 1 and statuses_of(it, 1) == {"accepted"}
    incarnation = it.incarnations["critic"]
    it.go_to_the_end()
    assert it.incarnations["critic"] == incarnation, "it is refused nothing"
