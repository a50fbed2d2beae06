"""The queue's view of a run before it starts: the shape of a step, the staleness bound, and who
needs what."""

from __future__ import annotations

from dataclasses import dataclass, replace

from relax_hpc.base.fields import fields_by
from relax_hpc.config.groups import base_name, trainers_of
from relax_hpc.config.roles import MAKERS, POLICY, ROLES
from relax_hpc.config.schema import Config

SUPERVISOR = "supervisor"
"""Name by which the supervisor speaks to the queue; one that looks after a single group is
supervisor-<group>."""
GENERATED = fields_by("rollout")
UNSCORED = tuple(name for name in GENERATED if name != "reward")
"""Fields that segments have: rewards come when a prompt group is whole."""
NEEDED = tuple(field for field in GENERATED if any(field in role.needs for role in ROLES.values()))
"""Generated fields that roles cannot work without."""
_STEPS_AHEAD = 3
"""Steps whose rows are read from files before they are trained on."""


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer: rows are ready for it when all of `needs` are present, and it adds `gives`."""

    needs: tuple[str, ...]
    gives: tuple[str, ...]
    in_order: bool
    """Whether windows are cut in ticket order alone, so that they do not depend on when rows
    arrive."""
    whole_step: bool = False
    """Whether windows are whole steps: what the task gives follows from all rows of one."""
    in_sets: bool = False
    """Whether windows are parts of a step's set, see `controller.step_sets`: so for trainers at
    staleness above 0, unless what they need was made for all tickets of a step together."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Shape of the run. A ticket is admitted for step ``ticket // prompts_per_step``; at staleness
    0 that trains it."""

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    max_staleness: int
    eval_every: int
    keep_steps: int
    tasks: dict[str, Task]
    """Tasks by name, those of no group of this run too: a journal may know them from before the
    groups were changed."""
    max_bytes: int
    max_rows: int
    """Bounds of the rows that wait for training, beyond which tickets are given out for the next
    step alone."""
    trainers: dict[str, str]
    """Roles that train, and the group that each is in."""
    groups: frozenset[str]
    """Groups as configured; what others hold from before the groups were changed comes back."""
    publish_lag: int = 64
    """Versions that an engine may be behind the newest and still get tickets."""
    colocated: str = ""
    """Group whose actor and engines take turns; empty: there is none."""
    engines: int = 1
    """Engines of the rollout group, as configured."""
    refresh_every: int = 0
    """Interval of versions that are kept for the reference: the newest that is a multiple of it; 0:
    none."""
    maker: str = "rollout"
    """Role that makes the rows."""
    compares: bool = False
    """Whether the loss compares the episodes of a prompt group, all of which are then in one
    micro-batch."""

    @classmethod
    def of(cls, config: Config) -> Plan:
        """The plan that ``config`` describes."""
        in_order, algorithm = config.max_staleness == 0, config.algorithm
        tasks = {
            name: Task(role.needs, fields_by(name), in_order)
            for name, role in ROLES.items()
            if name not in MAKERS and not role.trains and fields_by(name)
        }
        active = {role for group in config.groups.values() for role in group.roles}
        scores = {ROLES[name].scores: name for name in active if ROLES[name].scores}
        tasks |= {
            task: Task(ROLES[name].needs, fields_by(name), in_order)
            for task, name in scores.items()
        }
        # What follows from a prompt group alone is the same in whichever window that comes.
        whole = algorithm.whole_step
        tasks["advantages"] = Task(
            algorithm.needs, algorithm.gives, in_order=False, whole_step=whole
        )
        learned = tuple(
            field
            for name, task in tasks.items()
            if name in active or name in scores
            for field in task.gives
        )
        trainers, in_sets = {POLICY: POLICY} | trainers_of(config.groups), not (in_order or whole)
        for name in trainers:
            tasks[name] = Task((*ROLES[name].needs, *learned), (), not in_sets, in_sets=in_sets)
        made = cls(
            steps=config.steps,
            prompts_per_step=config.prompts_per_step,
            samples_per_prompt=config.samples_per_prompt,
            max_staleness=config.max_staleness,
            eval_every=config.eval.every,
            keep_steps=config.queue.keep_steps,
            tasks=tasks,
            max_bytes=config.queue.max_bytes,
            max_rows=config.queue.max_rows,
            trainers=trainers,
            groups=frozenset(config.groups),
            publish_lag=config.weights.publish_lag,
            colocated=trainers[POLICY] if config.colocate else "",
            engines=config.rollout.replicas,
            refresh_every=algorithm.kl.refresh_every,
        )
        return made._of_files(algorithm.sequences) if algorithm.from_file else made

    def _of_files(self, sequences: int) -> Plan:
        """The plan where rows are those of files, ``sequences`` each: they have no age, are made a
        few steps ahead, and the actor itself evaluates."""
        rows = min(self.max_rows, _STEPS_AHEAD * self.prompts_per_step * sequences)
        ageless = {"max_staleness": self.steps, "publish_lag": self.steps}
        return replace(
            self, maker="data", compares=sequences > 1, eval_every=0, max_rows=rows, **ageless
        )

    @property
    def undeclared(self) -> bytes:
        """Rows of each episode of a prompt group that nobody has declared, as in `row_ids`: it
        counts as having one."""
        return bytes([1]) * self.samples_per_prompt

    def knows(self, group: str) -> bool:
        """Whether ``group`` is one of the run's, an elastic member of one, or a supervisor."""
        return group == SUPERVISOR or bool(
            base_name(group.removeprefix(f"{SUPERVISOR}-"), self.groups)
        )

    def step_of(self, ticket: int) -> int:
        return ticket // self.prompts_per_step

    def eval_due(self, evaluated: int, version: int) -> bool:
        """Whether an engine that serves ``version`` owes an evaluation, ``evaluated`` (-1: none)
        being the last."""
        if not self.eval_every:
            return False
        at_end = version == self.steps and evaluated < self.steps
        return at_end or (
            evaluated < 0 or version // self.eval_every > evaluated // self.eval_every
        )
