"""Clock of a trainer role: when it ends before its last step."""

from __future__ import annotations

import time

_MARGIN = 1.5
"""Factor by which a step may take longer than the longest so far."""


class AtEdge(Exception):
    """Training ends at the edge of the step it is at, which has changed nothing yet; the message
    says why."""


class StepClock:
    """Whether the time limit leaves room for another step and its checkpoint, by the longest ones
    so far."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline, self.step_s, self.save_s = deadline, 0.0, 0.0

    def took(self, step_s: float, save_s: float) -> None:
        """Take the seconds of a step, and of the last checkpoint."""
        self.step_s, self.save_s = max(self.step_s, step_s), max(self.save_s, save_s)

    def room(self) -> bool:
        """Whether to start another step; true while nothing was measured."""
        return (
            self.deadline is None
            or time.time() + _MARGIN * (self.step_s + self.save_s) < self.deadline
        )

    def reason(self, stop: bool) -> str:
        """Reason to end at this step's edge; empty: go on."""
        return (
            "asked to stop"
            if stop
            else ""
            if self.room()
            else "the time limit leaves no room for a step"
        )
