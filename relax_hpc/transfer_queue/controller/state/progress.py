"""How far the run is: steps trained, checkpoints, evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax_hpc.transfer_queue.plan import Plan


@dataclass(slots=True)
class Progress:
    """Of the actor's training."""

    plan: Plan = field(compare=False)
    trained_steps: int = 0
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Step, incarnation, name and digest of each, the latest last."""
    evaluated: int = -1
    """The highest version that was evaluated."""
    gathered: int = 0
    """The lowest step whose rows may be left to be gathered into a file."""

    @property
    def covered_steps(self) -> int:
        """Steps that a checkpoint covers."""
        return min(self.checkpoints[-1]["step"], self.trained_steps) if self.checkpoints else 0

    def finished(self) -> bool:
        """Every step is trained, the last weights are saved, and evaluated if evaluation is on."""
        steps = self.plan.steps
        if self.trained_steps < steps or (self.plan.eval_every and self.evaluated < steps):
            return False
        return any(point["step"] >= steps for point in self.checkpoints)

    def resume(self, step: int) -> None:
        """What was done at ``step`` and later counts no more."""
        self.trained_steps = step
        self.evaluated = min(self.evaluated, step)
        self.gathered = min(self.gathered, step)
        self.checkpoints = [point for point in self.checkpoints if point["step"] <= step]

    def dump(self) -> Any:
        return self.trained_steps, self.checkpoints, self.evaluated, self.gathered

    def load(self, values: Any) -> None:
        self.trained_steps, self.checkpoints, self.evaluated, self.gathered = values
