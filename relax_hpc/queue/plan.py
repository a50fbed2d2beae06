"""The plan of a run, as the queue needs it: the shape of a step, the staleness bound, and the tasks
with the fields that they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from relax_hpc.base.fields import fields_by
from relax_hpc.config.groups import base_name, group_with_role, groups_that_train, rank_count
from relax_hpc.config.roles import MAKERS, POLICY, ROLES
from relax_hpc.config.schema import Config

SUPERVISOR = "supervisor"
"""Name under which the supervisor sends messages to the queue. One that supervises a single group
is supervisor-<group>."""
GENERATED = fields_by("rollout")
UNSCORED = tuple(name for name in GENERATED if name != "reward")
"""Fields of segments: rewards are known only when a prompt group is complete."""
_STEPS_AHEAD = 3
"""Steps whose rows may be read from files before they are trained."""


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer: rows are ready for it when all of `needs` are present, and it adds `gives`."""

    needs: tuple[str, ...]
    gives: tuple[str, ...]
    in_order: bool
    """Whether windows are cut in ticket order, so that they do not depend on when rows arrive."""
    whole_step: bool = False
    """Whether a window is a whole step, because the result depends on all rows of the step."""
    in_sets: bool = False
    """Whether windows are parts of a step's set, see `planning.step_sets`. This is so for trainers
    at staleness above 0, unless they need a field that is computed from a whole step."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Engines of the run, as operations of the API change them."""

    group: str = "rollout"
    """The configured group of the engines."""
    engines: int = 1
    """Engines of the group and of each of its further members."""
    processes: int = 1
    """Processes among which the engines of a group are divided evenly."""
    has_members: bool = True
    """Whether the group can have further members."""
    colocated: bool = False
    min_engines: int = 1
    max_engines: int = 0
    """Most engines of the run; 0: there is no limit."""

    @classmethod
    def from_config(cls, config: Config) -> EnginePlan:
        """The engines that ``config`` describes."""
        group = group_with_role(config, "rollout")
        if not group:
            return cls(group="", engines=0, has_members=False)
        return cls(
            group=group,
            engines=config.rollout.replicas,
            processes=rank_count(config, group, "rollout"),
            has_members=config.groups[group].roles == ["rollout"],
            colocated=config.colocate,
            min_engines=config.service.min_engines,
            max_engines=config.service.max_engines,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Shape of the run. A ticket is admitted for step ``ticket // prompts_per_step``; at staleness
    0 this step trains it."""

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    max_staleness: int
    eval_every: int
    keep_steps: int
    tasks: dict[str, Task]
    """Tasks by name. It includes tasks of roles that this run does not have, because its journal
    may contain them from before the groups were changed."""
    max_bytes: int
    max_rows: int
    """Bounds of the rows that wait for training. Above them, tickets are admitted only for the next
    step."""
    trainers: dict[str, str]
    """Roles that train, and the group of each."""
    needed: tuple[str, ...]
    """Generated fields that every prompt group must have, because roles of this run need them."""
    groups: frozenset[str]
    """Configured groups. Leases and tickets of other groups, from before a change, are taken
    back."""
    publish_lag: int = 64
    """Versions that an engine may be behind the newest and still get tickets."""
    colocated: str = ""
    """Group whose actor and engines take turns on the same devices; empty: no group does."""
    engines: int = 1
    """Engines of the rollout group, as configured."""
    engine_plan: EnginePlan = EnginePlan()
    refresh_every: int = 0
    """The newest version whose number is a multiple of this is kept for the reference; 0: none."""
    maker: str = "rollout"
    """Role that generates the rows or reads them from files."""
    compares: bool = False
    """Whether the loss compares the episodes of a prompt group. All of them are then in the same
    micro-batch."""

    @classmethod
    def from_config(cls, config: Config) -> Plan:
        """The plan that ``config`` describes."""
        algorithm, trainers = config.algorithm, {POLICY: POLICY} | groups_that_train(config.groups)
        plan = cls(
            steps=config.steps,
            prompts_per_step=config.prompts_per_step,
            samples_per_prompt=config.samples_per_prompt,
            max_staleness=config.max_staleness,
            eval_every=config.eval.every,
            keep_steps=config.queue.keep_steps,
            tasks=_tasks(config, trainers),
            max_bytes=config.queue.max_bytes,
            max_rows=config.queue.max_rows,
            trainers=trainers,
            needed=_needed_fields(config, trainers),
            groups=frozenset(config.groups),
            publish_lag=config.weights.publish_lag,
            colocated=trainers[POLICY] if config.colocate else "",
            engines=config.rollout.replicas,
            engine_plan=EnginePlan.from_config(config),
            refresh_every=algorithm.kl.refresh_every,
        )
        if algorithm.from_file:
            return plan._with_rows_of_files(algorithm.sequences)
        if config.only == "rollout":
            return plan._for_generation(group_with_role(config, "collector"))
        if config.only == "train":
            return replace(plan, maker="exported_rows", eval_every=0)
        return plan

    def _with_rows_of_files(self, sequences: int) -> Plan:
        """This plan for rows that are read from files, ``sequences`` for each ticket.

        These rows have no version and never become stale. They are read a few steps ahead. The
        actor evaluates, because the run has no engine.
        """
        return replace(
            self,
            maker="data",
            compares=sequences > 1,
            eval_every=0,
            max_rows=min(self.max_rows, _STEPS_AHEAD * self.prompts_per_step * sequences),
            max_staleness=self.steps,
            publish_lag=self.steps,
        )

    def _for_generation(self, group: str) -> Plan:
        """This plan for a run that only generates. The role collector of ``group`` takes the rows
        in place of the policy.

        All rows are of the start weights, so none becomes stale, and all are kept for the export.
        """
        return replace(
            self,
            trainers={POLICY: group},
            eval_every=0,
            keep_steps=self.steps,
            max_staleness=self.steps,
            publish_lag=self.steps,
            refresh_every=0,
        )

    @property
    def undeclared(self) -> bytes:
        """Rows of each episode of a prompt group that is not declared yet, as in `row_ids`: each
        episode counts as one row."""
        return bytes([1]) * self.samples_per_prompt

    def knows(self, group: str) -> bool:
        """Whether ``group`` is a group of the run, an elastic member of one, or a supervisor."""
        return group == SUPERVISOR or bool(
            base_name(group.removeprefix(f"{SUPERVISOR}-"), self.groups)
        )

    def step_of(self, ticket: int) -> int:
        return ticket // self.prompts_per_step

    def eval_due(self, evaluated: int, version: int) -> bool:
        """Whether an engine that serves ``version`` has to evaluate it. ``evaluated``: the last
        evaluated version; -1: none."""
        if not self.eval_every:
            return False
        at_end = version == self.steps and evaluated < self.steps
        return at_end or (
            evaluated < 0 or version // self.eval_every > evaluated // self.eval_every
        )


def _roles_in_groups(config: Config) -> set[str]:
    """Roles that are in a group of the run."""
    return set(chain.from_iterable(group.roles for group in config.groups.values()))


def _needed_fields(config: Config, trainers: Iterable[str]) -> tuple[str, ...]:
    """Generated fields that the run's roles require; see `Plan.needed`."""
    needed: set[str] = set()
    for name in _roles_in_groups(config).union(config.actor.forward, trainers):
        needed.update(ROLES[name].needs)
    return tuple(field for field in GENERATED if field in needed)


def _tasks(config: Config, trainers: dict[str, str]) -> dict[str, Task]:
    """All tasks by name; see `Plan.tasks`."""
    in_order, algorithm = config.max_staleness == 0, config.algorithm
    tasks: dict[str, Task] = {}
    for name, role in ROLES.items():
        gives = fields_by(name)
        if gives and name not in MAKERS and not role.trains:
            tasks[name] = Task(role.needs, gives, in_order)
    active = _roles_in_groups(config)
    scores = {ROLES[name].scores: name for name in active if ROLES[name].scores}
    for task, name in scores.items():
        tasks[task] = Task(ROLES[name].needs, fields_by(name), in_order)
    # Advantages that follow from a prompt group alone are the same in any window. Only those that
    # follow from the whole step need a window of a whole step.
    whole = algorithm.whole_step
    tasks["advantages"] = Task(algorithm.needs, algorithm.gives, in_order=False, whole_step=whole)
    added: list[str] = []
    for name, task_of_run in tasks.items():
        if name in active or name in scores:
            added += task_of_run.gives
    in_sets = not (in_order or whole)
    for name in trainers:
        needs = (*ROLES[name].needs, *added)
        tasks[name] = Task(needs, (), not in_sets, in_sets=in_sets)
    return tasks
