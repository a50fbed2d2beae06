"""The queue's service: it checks, journals, applies and answers each request. It has no sockets.

The handler of a request (`controller.handlers`) is registered by the request's `op`. The
annotations of its arguments are the request's schema. It returns the answer, or raises NotYet with
the topic for which the request waits. Requests are idempotent: a client repeats a request if the
reply or the controller was lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from relax_hpc.base.disk_waits import WAITS, DiskWait
from relax_hpc.base.errors import RelaxError
from relax_hpc.config.schema import CheckpointConfig
from relax_hpc.queue.controller import handlers
from relax_hpc.queue.controller.handlers.operations import ReportedGroups, update_operations
from relax_hpc.queue.controller.journal import Journal
from relax_hpc.queue.controller.messages import Refused, Request, Schema
from relax_hpc.queue.controller.relays import Relays
from relax_hpc.queue.controller.save_clock import SaveClock
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.waiting import WaitingRequests
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.presence import GroupPresence
from relax_hpc.queue.records import OBSERVER_INCARNATION, Owner

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


_OnReport = Callable[[str, int, dict[str, float], dict[str, float]], None]
_FOR_OBSERVERS = (
    *("beat", "status", "checkpoints"),
    *("operation_create", "operation_get", "operation_list", "operation_cancel", "engines_present"),
)
LEASE_S = 30.0
SCHEMAS = {op: Schema(handler) for op, handler in handlers.HANDLERS.items()}
"""Schemas of the arguments of requests, by their `op`."""


class BrokenStateError(RelaxError):
    """A record could not be applied after it was checked. The state must be restored by a replay of
    the journal."""


class QueueService:
    """`on_report(role, step, values, seconds)` receives reports of roles: the hub writes
    metrics."""

    def __init__(
        self,
        plan: Plan,
        incarnation: int,
        state: QueueState,
        journal: Journal,
        lease_s: float = LEASE_S,
    ) -> None:
        """``lease_s``: a group without beats for this long counts as absent."""
        self.plan, self.incarnation, self.state, self.journal = plan, incarnation, state, journal
        self.waiting = WaitingRequests()
        self.presence = GroupPresence(plan.groups, lease_s, time.monotonic())
        self.beats = Beats()
        self.relays = Relays()
        self.reported_groups = ReportedGroups()
        self.save_clock = SaveClock(CheckpointConfig())
        self.refused_connections = 0
        self.on_report: _OnReport = lambda *_: None
        self.on_show: Callable[[int, list[str]], None] = lambda *_: None
        self.on_first_failure: Callable[[str, str, str, str, str], None] = lambda *_: None
        self.on_resume: Callable[[int], None] = lambda _: None

    def handle(self, request: Request) -> Any:
        """Answer to a request. Raises Refused, or NotYet if the request has to wait."""
        schema = SCHEMAS.get(request.op)
        if schema is None:
            raise Refused("refused", f"unknown request {request.op!r:.40}")
        group, incarnation = request.owner
        if incarnation == OBSERVER_INCARNATION and request.op not in _FOR_OBSERVERS:
            raise Refused(
                "refused", f"{request.op}: not for an observer, allowed {', '.join(_FOR_OBSERVERS)}"
            )
        members = self.state.members
        is_observer = incarnation == OBSERVER_INCARNATION
        lowest = 0 if is_observer else members.lowest_allowed(request.owner)
        if lowest:
            raise Refused(
                "fenced",
                f"{group} incarnation {incarnation} is over: only incarnation {lowest} or later "
                "may continue",
            )
        fault = schema.find_fault(request.args)
        if fault:
            raise Refused("refused", f"{request.op}: malformed arguments: {fault}")
        if incarnation > members.incarnations.get(group, 0):
            self.record(op="register", group=group, incarnation=incarnation)
        try:
            return handlers.HANDLERS[request.op](self, request, **request.args)
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            text = f"{request.op}: malformed arguments: {type(error).__name__}: {error}"
            raise Refused("refused", text) from error

    def update_presence(self) -> None:
        """Check which groups are absent. While one is absent, or a disk is full, timeouts are
        paused."""
        full, now = bool(self.beats.disk_wait()), time.monotonic()
        self.presence.update(self.beats.latest, self.state.members.lowest_allowed, now, full)

    def update_operations(self) -> None:
        """Move operations whose engines have changed or whose deadline has passed."""
        if self.state.operations.has_open:
            update_operations(self)

    def record(self, **record: Any) -> None:
        """Apply a record, and journal it."""
        try:
            self.state.apply(record)
        except Exception as error:
            # The record is not journaled, because every replay would fail at it.
            raise BrokenStateError(
                f"{record['op']}: cannot be applied: {type(error).__name__}: {error}"
            ) from error
        self.journal.append(record)
