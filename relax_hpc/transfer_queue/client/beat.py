"""What a process says of itself with every beat: how far it is, what it is at, and whom or what it waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from relax_hpc.disk import WAITS, DiskWait


class Beat:
    """Times are of the monotonic clock, seconds."""

    def __init__(self, has_hub: Callable[[], bool]) -> None:
        self._has_hub = has_hub
        self.progress = 0
        self.busy: Callable[[], float] = lambda: 0.0
        """Seconds that this process has been at one piece of work."""
        self.loads: Callable[[], bool] = lambda: False
        """Whether it has yet to begin."""
        self.unsaved: dict[str, Any] = {}
        """Of an actor whose last checkpoints could not be written: the step of the one that was, since when (of the
        wall clock), how many failed, and why."""
        self.stood_s = 0.0
        """For how long, so far, there was no hub, or it let clocks stand."""
        self.waits: DiskWait = {}
        """Which disk somebody waits for, as the hub said last."""
        self._doing, self._doing_since, self._awaits = "", 0.0, False
        self._stands = True
        self._waited_at = -math.inf
        self._beaten = 0.0
        self._gap = 0.0

    def at_work(self, doing: str, waits: bool = False) -> None:
        """Have beats tell people what this process is at, and since when; empty: nothing that they need to know.

        ``waits``: for others. Then it loads nothing, and the others do not wait for it.
        """
        self._awaits = waits
        if doing != self._doing:
            self._doing, self._doing_since = doing, time.monotonic()

    @property
    def hindered(self) -> bool:
        """Whether somebody, this process or another, waits for a disk, or there is no hub to answer."""
        own = WAITS.longest()
        return bool(self.waits or (own and not own["loose"]) or not self._has_hub())

    def passes(self, now: float) -> None:
        """Another one is due."""
        passed = now - (self._beaten or now)
        self._gap = max(self._gap, passed)
        # Until a hub says otherwise: who beats in vain has none.
        self.stood_s, self._stands = self.stood_s + passed * self._stands, True
        self._beaten = now

    def answered(self, answer: dict[str, Any]) -> None:
        """What the hub says to it: whether clocks stand, and for which disk."""
        if "stands" in answer:
            self._stands = bool(answer["stands"])
            self.waits = found if isinstance(found := answer.get("waits"), dict) else {}

    def about(self) -> dict[str, Any]:
        """What it says: work done, how long it is at one piece, its longest gap between beats so far, whether it is
        loading, and what it is at; while it loads, how long one part takes. Who waits for others, for a disk, its own
        or another's, or has no hub to answer, is at no work."""
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
        return about | ({"disk": own} if own else {}) | ({"unsaved": self.unsaved} if self.unsaved else {})
