"""Clock of a trainer role: decides whether it ends before its last step."""

from __future__ import annotations

import time

_MARGIN = 1.5
"""Factor by which a step may take longer than the longest step so far."""


class StopBeforeStep(Exception):
    """Training ends before the present step, which has changed nothing yet. The message is the
    reason."""


class StepClock:
    """Estimates from the longest durations so far whether another step and its checkpoint fit into
    the time limit."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline, self.step_s, self.save_s = deadline, 0.0, 0.0

    def record(self, step_s: float, save_s: float) -> None:
        """Record the seconds of a step, and of the last checkpoint."""
        self.step_s, self.save_s = max(self.step_s, step_s), max(self.save_s, save_s)

    def has_room(self) -> bool:
        """Whether another step may start; true before the first measurement."""
        if self.deadline is None:
            return True
        return time.time() + _MARGIN * (self.step_s + self.save_s) < self.deadline

    def stop_reason(self, stop: bool) -> str:
        """Return the reason to end before the present step; empty: continue."""
        if stop:
            return "asked to stop"
        return "" if self.has_room() else "the time limit leaves no room for a step"
