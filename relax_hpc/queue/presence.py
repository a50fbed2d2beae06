"""Presence of groups: which groups are absent or loading, so that timeouts of waiting processes are
paused.

While a group is pending, starts, loads or is replaced, and while any process works, no timeout of a
waiting process runs. If a timeout still expires, all groups are present, no process works, and no
result arrives: that is a fault of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from relax_hpc.config.groups import base_name
from relax_hpc.config.schema import Config

UPDATE_S = 1.0
"""Seconds between two updates."""
_DAY_S = 86400.0
_JOB_S = 365 * _DAY_S
"""Seconds that no Slurm job lasts: its time limit ends it first."""


def longest_wait_s(config: Config) -> float:
    """The most seconds for which timeouts may be paused."""
    return config.liveness.longest_wait_s or (_DAY_S if config.layout == "local" else _JOB_S)


class GroupPresence:
    """The controller's view of all groups except its own. Times are of the monotonic clock, in
    seconds."""

    def __init__(self, groups: Collection[str], lease_s: float, now: float) -> None:
        self.groups, self.lease_s = [name for name in groups if name != "hub"], lease_s
        self.paused_s = 0.0
        """Seconds for which timeouts were paused so far."""
        self.paused = False
        """Whether timeouts are paused now."""
        self.awaited_groups: dict[str, tuple[str, float]] = {}
        """Groups that are absent or loading, with the reason, and since when (monotonic
        seconds)."""
        self._updated_at = now

    def update(
        self,
        beats: Mapping[str, Mapping[str, Any]],
        over: Callable[[tuple[str, int]], int],
        now: float,
        full: bool = False,
    ) -> None:
        """Judge by the newest ``beats``. Does nothing if the last update was less than `UPDATE_S`
        ago.

        ``over``: function that gives 0 for an incarnation that is still valid. ``full``: a process
        waits for disk space, and all others wait for it.
        """
        passed_s = now - self._updated_at
        if passed_s < UPDATE_S:
            return
        self._updated_at = now
        live = [
            beat
            for beat in beats.values()
            if now - beat["at"] <= self.lease_s and not over((beat["group"], beat["incarnation"]))
        ]
        reasons = {name: self._reason_to_wait(name, live) for name in self.groups}
        self.awaited_groups = {
            name: (reason, self.awaited_groups.get(name, ("", now))[1])
            for name, reason in reasons.items()
            if reason
        }
        busy = any(beat.get("busy_s") or beat.get("loads") for beat in live)
        self.paused = full or bool(self.awaited_groups) or busy
        if self.paused:
            self.paused_s += passed_s

    def _reason_to_wait(self, name: str, live: Collection[Mapping[str, Any]]) -> str:
        """Reason to wait for the group; empty if it is present."""
        beats = [beat for beat in live if base_name(beat["group"], self.groups) == name]
        if not beats:
            return "is not there"
        return "is loading" if all(beat.get("loads") for beat in beats) else ""

    def report(self, now: float) -> dict[str, dict[str, Any]]:
        """Groups of `awaited_groups` for a message: {group: {"why", "since_s"}}."""
        return {
            name: {"why": reason, "since_s": now - since}
            for name, (reason, since) in self.awaited_groups.items()
        }
