"""Last beats of the members, and their failing writes."""

from __future__ import annotations

import time
from typing import Any

from relax_hpc.base.disk_waits import WAITS, DiskWait
from relax_hpc.queue.records import Owner

_FRESH_S = 10.0
"""Seconds for which timeouts are paused after a member has reported a wait for a disk."""


class Beats:
    """The last beat of each member."""

    def __init__(self) -> None:
        self.latest: dict[str, dict[str, Any]] = {}
        """Last beat by `group/member`, with `group`, `incarnation`, and `at`: seconds of the
        monotonic clock."""
        self._disk_waits: dict[str, tuple[float, DiskWait]] = {}

    def take(self, owner: Owner, member: str, content: dict[str, Any], disk: DiskWait) -> None:
        """Store a beat; ``disk``: a failing write of the member; empty: it has none."""
        (group, incarnation), now = owner, time.monotonic()
        name = f"{group}/{member}"
        self.latest[name] = {**content, "group": group, "incarnation": incarnation, "at": now}
        self._disk_waits.pop(name, None)
        if disk:
            self._disk_waits[name] = now, dict(disk)

    def forget(self, owner: Owner) -> None:
        """Forget the members of ``owner``, which has ended."""
        ended = [
            name
            for name, beat in self.latest.items()
            if (beat["group"], beat["incarnation"]) == owner
        ]
        for name in ended:
            del self.latest[name]
            self._disk_waits.pop(name, None)

    def disk_wait(self) -> DiskWait:
        """A failing write for which processes wait; empty: no process waits for a disk."""
        if not WAITS and not self._disk_waits:
            return {}
        since = time.monotonic() - _FRESH_S
        fresh = [wait for at, wait in self._disk_waits.values() if at > since]
        return next((wait for wait in (WAITS.longest(), *fresh) if wait and not wait["loose"]), {})

    def disk_waits(self) -> list[dict[str, Any]]:
        """Failing writes of all members, the hub's own first."""
        waits = [{"who": name, **wait} for name, (_, wait) in sorted(self._disk_waits.items())]
        hub_wait = WAITS.longest()
        return [{"who": "hub/controller", **hub_wait}, *waits] if hub_wait else waits
