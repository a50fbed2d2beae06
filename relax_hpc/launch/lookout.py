"""Which groups hang: they live, but the hub has not heard a beat of them for a lease; or the hub does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future

from relax_hpc.errors import DeadlineError
from relax_hpc.transfer_queue.client import QueueClient


class Lookout:
    """Asks the hub for its beats, three times a lease. `look` never waits.

    A role is dead when two answers in a row say so: a hub that was stopped itself has beats to read first.
    """

    def __init__(self, client: QueueClient, lease_s: float) -> None:
        self.client, self.lease_s = client, lease_s
        self._next = time.monotonic() + lease_s
        self._answer: Future | None = None
        self._suspects: set[tuple[str, str, int]] = set()

    def look(self) -> Iterable[tuple[str, str, int]]:
        """(group, role, epoch) that are dead; ("hub", "controller", 0) if the hub owes an answer for a lease."""
        now, answer = time.monotonic(), self._answer
        if answer is None:
            if now >= self._next:
                self._next = now + self.lease_s / 3
                self._answer = self.client.submit("status", timeout=self.lease_s)
            return ()
        if not answer.done():
            return ()
        self._answer = None
        if answer.exception():
            self._suspects = set()
            return [("hub", "controller", 0)] if isinstance(answer.exception(), DeadlineError) else ()
        beats = answer.result()["beats"]
        silent = {(b["group"], role, b["epoch"]) for role, b in beats.items() if b["age_s"] > self.lease_s}
        dead, self._suspects = silent & self._suspects, silent
        return sorted(dead)
