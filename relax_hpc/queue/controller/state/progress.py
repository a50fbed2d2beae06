"""Progress of a run: steps trained, checkpoints, evaluations.

A step is trained when all roles that train have trained it, and a checkpoint is whole when each of
them has its part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax_hpc.config.roles import POLICY
from relax_hpc.queue.plan import Plan


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
