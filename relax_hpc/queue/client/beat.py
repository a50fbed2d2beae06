"""The beat of a process: its progress, its present work, and the resource for which it waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from relax_hpc.base.disk_waits import WAITS, DiskWait


class Beat:
    """Content of the beats of one process. Times are of the monotonic clock, in seconds."""

    def __init__(self, has_hub: Callable[[], bool]) -> None:
        self._has_hub = has_hub
        self.progress = 0
        self.busy: Callable[[], float] = lambda: 0.0
        """Seconds for which this process has worked on one task."""
        self.loads: Callable[[], bool] = lambda: False
        """Whether this process is loading and has not begun its work."""
        self.unsaved: dict[str, Any] = {}
        """Checkpoints that a trainer could not write: the step of its last one, since when (wall
        clock) writes fail, the number of failures, and the reason."""
        self.paused_s = 0.0
        """Seconds so far without a hub, or with a hub that paused timeouts."""
        self.disk_wait: DiskWait = {}
        """Disk for which some process waits, as the hub said in its last answer."""
        self._phase, self._phase_since, self._waits_for_others = "", 0.0, False
        self._paused = True
        self._waited_at = -math.inf
        self._beaten_at = 0.0
        self._gap_s = 0.0

    def set_phase(self, phase: str, waits: bool = False) -> None:
        """Report in beats what this process does, for people, and since when; empty: its usual
        work.

        ``waits``: it waits for other groups. It is then not loading, and others do not wait for it.
        """
        self._waits_for_others = waits
        if phase != self._phase:
            self._phase, self._phase_since = phase, time.monotonic()

    @property
    def is_blocked(self) -> bool:
        """Whether this or another process waits for a disk, or the hub cannot be reached."""
        wait = WAITS.longest()
        return bool(self.disk_wait or (wait and not wait["loose"]) or not self._has_hub())

    def count_time(self, now: float) -> None:
        """Count the time since the last beat. Called at each beat."""
        passed_s = now - (self._beaten_at or now)
        self._gap_s = max(self._gap_s, passed_s)
        if self._paused:
            self.paused_s += passed_s
        # Timeouts are paused until the hub answers otherwise: without an answer there is no hub.
        self._paused = True
        self._beaten_at = now

    def read_answer(self, answer: dict[str, Any]) -> None:
        """Read the hub's answer to a beat: whether timeouts are paused, and for which disk."""
        if "stands" in answer:
            self._paused = bool(answer["stands"])
            waits = answer.get("waits")
            self.disk_wait = waits if isinstance(waits, dict) else {}

    def content(self) -> dict[str, Any]:
        """Content of a beat.

        It has the work done, seconds on one task, the longest gap between beats so far, whether the
        process is loading, and its phase with its seconds; while it loads, the seconds of one part.
        A process that waits for others, for a disk, or for the hub, is not busy.
        """
        own_disk, now = WAITS.longest(), time.monotonic()
        if self.is_blocked or self._waits_for_others:
            self._waited_at = now
        busy_s = min(self.busy(), now - self._waited_at)
        loads = self.loads() and not self._waits_for_others
        content: dict[str, Any] = {
            "progress": self.progress,
            "busy_s": busy_s,
            "gap_s": self._gap_s,
            "loads": loads,
        }
        if self._phase:
            content |= {"doing": self._phase, "doing_s": now - self._phase_since}
            if loads:
                content["loading_s"] = now - max(self._phase_since, self._waited_at)
        if own_disk:
            content["disk"] = own_disk
        if self.unsaved:
            content["unsaved"] = self.unsaved
        return content
