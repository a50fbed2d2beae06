"""The beat of a process: its progress, what it is doing, and whom or what it waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from relax_hpc.base.disk_waits import WAITS, DiskWait


class Beat:
    """Contents of the beats of one process. Times are of the monotonic clock, seconds."""

    def __init__(self, has_hub: Callable[[], bool]) -> None:
        self._has_hub = has_hub
        self.progress = 0
        self.busy: Callable[[], float] = lambda: 0.0
        """Seconds that this process has been at one piece of work."""
        self.loads: Callable[[], bool] = lambda: False
        """Whether this process is loading, and has yet to begin its work."""
        self.unsaved: dict[str, Any] = {}
        """Checkpoints that an actor could not write: the step of its last written one, since when
        (wall clock) writes fail, how many failed, and why."""
        self.paused_s = 0.0
        """Seconds so far without a hub, or with one that let clocks stand."""
        self.waits: DiskWait = {}
        """Disk that somebody waits for, as the hub said last."""
        self._doing, self._doing_since, self._awaits = "", 0.0, False
        self._stands = True
        self._waited_at = -math.inf
        self._beaten = 0.0
        self._gap = 0.0

    def at_work(self, doing: str, waits: bool = False) -> None:
        """Have beats tell people what this process is at, and since when; empty: nothing that they
        need to know.

        ``waits``: for others. Then it loads nothing, and the others do not wait for it.
        """
        self._awaits = waits
        if doing != self._doing:
            self._doing, self._doing_since = doing, time.monotonic()

    @property
    def hindered(self) -> bool:
        """Whether somebody, this process or another, waits for a disk, or there is no hub to
        answer."""
        own = WAITS.longest()
        return bool(self.waits or (own and not own["loose"]) or not self._has_hub())

    def passes(self, now: float) -> None:
        """Count the time since the last beat: another one is due."""
        passed = now - (self._beaten or now)
        self._gap = max(self._gap, passed)
        # Until a hub says otherwise: who beats in vain has none.
        self.paused_s, self._stands = self.paused_s + passed * self._stands, True
        self._beaten = now

    def answered(self, answer: dict[str, Any]) -> None:
        """Take the hub's answer to a beat: whether clocks stand, and for which disk."""
        if "stands" in answer:
            self._stands = bool(answer["stands"])
            self.waits = found if isinstance(found := answer.get("waits"), dict) else {}

    def about(self) -> dict[str, Any]:
        """Content of a beat: work done, seconds at one piece of work, longest gap between beats so
        far, whether the process is loading, and what it is doing; while it loads, the seconds at
        one part. A process that waits for others, for its own or another's disk, or has no hub to
        answer, is at no work."""
        own, now = WAITS.longest(), time.monotonic()
        if self.hindered or self._awaits:
            self._waited_at = now
        busy_s = min(self.busy(), now - self._waited_at)
        loads = self.loads() and not self._awaits
        about = {"progress": self.progress, "busy_s": busy_s, "gap_s": self._gap, "loads": loads}
        if self._doing:
            about |= {"doing": self._doing, "doing_s": now - self._doing_since}
        if self._doing and about["loads"]:
            about["loading_s"] = now - max(self._doing_since, self._waited_at)
        return (
            about
            | ({"disk": own} if own else {})
            | ({"unsaved": self.unsaved} if self.unsaved else {})
        )
