"""Last beats of the members, and their writes that do not succeed."""

from __future__ import annotations

import time
from typing import Any

from relax_hpc.base.disk_waits import WAITS, DiskWait
from relax_hpc.queue.records import Owner

_FRESH_S = 10.0
"""Seconds for which clocks stand after a member said that it waits for a disk, unless it says so
again."""


class Beats:
    """The last beat of each member."""

    def __init__(self) -> None:
        self.latest: dict[str, dict[str, Any]] = {}
        """Last beat by `group/member`, with `group`, `incarnation`, and `at`: seconds of the
        monotonic clock."""
        self._disk_waits: dict[str, tuple[float, DiskWait]] = {}

    def take(self, owner: Owner, member: str, about: dict[str, Any], disk: DiskWait) -> None:
        """Take a beat; ``disk``: a write that does not succeed; empty: there is none."""
        (group, incarnation), now = owner, time.monotonic()
        name = f"{group}/{member}"
        self.latest[name] = {**about, "group": group, "incarnation": incarnation, "at": now}
        self._disk_waits.pop(name, None)
        if disk:
            self._disk_waits[name] = now, dict(disk)

    def forget(self, owner: Owner) -> None:
        """Forget the members of ``owner``, which has ended."""
        for name in [
            name
            for name, beat in self.latest.items()
            if (beat["group"], beat["incarnation"]) == owner
        ]:
            del self.latest[name]
            self._disk_waits.pop(name, None)

    def disk_wait(self) -> DiskWait:
        """A write that does not succeed and that somebody waits for; empty: there is none."""
        if not WAITS and not self._disk_waits:
            return {}
        since = time.monotonic() - _FRESH_S
        found = [WAITS.longest(), *(wait for at, wait in self._disk_waits.values() if at > since)]
        return next((wait for wait in found if wait and not wait["loose"]), {})

    def disk_waits(self) -> list[dict[str, Any]]:
        """Writes of all members that do not succeed, the hub's own first."""
        own = [{"who": "hub/controller", **wait}] if (wait := WAITS.longest()) else []
        return own + [{"who": name, **wait} for name, (_, wait) in sorted(self._disk_waits.items())]
