"""Clock of checkpoints that are due by time (`checkpoint.every_s`).

The hub decides, so that all ranks of all trainers save the same step, whatever their clocks
show. It decides one step ahead, when the first trainer has trained the step before. A trainer
gets the decision with an answer for which it waits anyway, before its next update.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from relax_hpc.config.schema import CheckpointConfig


class SaveClock:
    """Seconds since the last saved step. They begin with the first step that is trained under this
    controller."""

    def __init__(
        self, settings: CheckpointConfig, now: Callable[[], float] = time.monotonic
    ) -> None:
        """``now``: seconds of a monotonic clock."""
        self.every, self.every_s = settings.every, settings.every_s
        self._now = now
        self._saved_at: float | None = None
        self._trained_at: float | None = None

    def is_next_due(self, steps: int, saved: bool) -> bool:
        """Whether time requires a checkpoint after the next step. Call it once for each step.

        ``steps``: number of trained steps. ``saved``: whether the last of them is saved because
        time required it. The next step is expected to take as long as the last one.
        """
        now = self._now()
        step_s = 0.0 if self._trained_at is None else now - self._trained_at
        self._trained_at = now
        if self._saved_at is None or saved or steps % self.every == 0:
            self._saved_at = now
        return bool(self.every_s) and now + step_s - self._saved_at >= self.every_s
