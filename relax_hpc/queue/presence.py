"""Groups that the others have to wait for: not there yet, or not any more. Waiting for them is not
failing.

While a group is queued, starts, loads or is being replaced, and while anybody is at work, the
clocks of those who wait stand. A clock that runs out says that all are there, nobody works, and
nothing comes: a mistake of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from relax_hpc.config.groups import base_name
from relax_hpc.config.schema import Config

LOOK_S = 1.0
"""Seconds between two looks."""
_DAY_S = 86400.0
_JOB_S = 365 * _DAY_S
"""Seconds that no job lasts: its end comes first."""


def longest_wait_s(config: Config) -> float:
    """Seconds for which a clock may stand, at most."""
    return config.liveness.longest_wait_s or (_DAY_S if config.layout == "local" else _JOB_S)


class Presence:
    """The controller's view of the groups of a run but its own. Times are of the monotonic clock,
    seconds."""

    def __init__(self, groups: Collection[str], lease_s: float, now: float) -> None:
        self.groups, self.lease_s = [name for name in groups if name != "hub"], lease_s
        self.stood_s = 0.0
        """Seconds for which clocks have stood so far."""
        self.stands = False
        """Whether clocks stand now."""
        self.lacking: dict[str, tuple[str, float]] = {}
        """Groups that are not there, why, and since when (monotonic seconds)."""
        self._looked = now

    def look(
        self,
        beats: Mapping[str, Mapping[str, Any]],
        over: Callable[[tuple[str, int]], int],
        now: float,
        full: bool = False,
    ) -> None:
        """Judge by the newest ``beats``; ``over`` says whether an incarnation is. Nothing if it has
        just looked.

        ``full``: somebody waits for a disk, and everybody for him.
        """
        if (passed := now - self._looked) < LOOK_S:
            return
        self._looked = now
        here = [
            b
            for b in beats.values()
            if now - b["at"] <= self.lease_s and not over((b["group"], b["incarnation"]))
        ]
        found = {name: why for name in self.groups if (why := self._why_lacking(name, here))}
        self.lacking = {
            name: (why, self.lacking.get(name, ("", now))[1]) for name, why in found.items()
        }
        self.stands = (
            full or bool(found) or any(beat.get("busy_s") or beat.get("loads") for beat in here)
        )
        if self.stands:
            self.stood_s += passed

    def _why_lacking(self, name: str, here: Collection[Mapping[str, Any]]) -> str:
        mine = [beat for beat in here if base_name(beat["group"], self.groups) == name]
        if not mine:
            return "is not there"
        return "is loading" if all(beat.get("loads") for beat in mine) else ""

    def report(self, now: float) -> dict[str, dict[str, Any]]:
        """Groups of `lacking` for others: {group: {"why", "since_s"}}."""
        return {
            name: {"why": why, "since_s": now - since}
            for name, (why, since) in self.lacking.items()
        }
