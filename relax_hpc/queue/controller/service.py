"""The queue's service: each request is checked, journaled, applied and answered; no sockets here.

What is done for a request says its handler (`controller.handlers`), registered by the request's
`op`; the annotations of its arguments are the request's schema. It returns the answer, or raises
NotYet with what the request waits for. Requests are idempotent: a client that lost the reply, or
its controller, asks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.config.schema import CheckpointConfig
from relax_hpc.queue.controller import handlers
from relax_hpc.queue.controller.beats import Beats
from relax_hpc.queue.controller.journal import Journal
from relax_hpc.queue.controller.messages import Refused, Request, Schema
from relax_hpc.queue.controller.relays import Relays
from relax_hpc.queue.controller.save_clock import SaveClock
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.waiting import WaitingRequests
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.presence import GroupPresence
from relax_hpc.queue.records import OBSERVER_INCARNATION

_OnReport = Callable[[str, int, dict[str, float], dict[str, float]], None]
_FOR_OBSERVERS = ("beat", "status", "checkpoints")
LEASE_S = 30.0
SCHEMAS = {op: Schema(handler) for op, handler in handlers.HANDLERS.items()}
"""Schemas of the arguments of requests, by their `op`."""


class BrokenStateError(RelaxError):
    """A record could not be applied after it was checked: only a replay of the journal gives a
    state to go on with."""


class QueueService:
    """`on_report(role, step, values, seconds)` receives what roles report (the hub writes
    metrics)."""

    def __init__(
        self,
        plan: Plan,
        incarnation: int,
        state: QueueState,
        journal: Journal,
        lease_s: float = LEASE_S,
    ) -> None:
        """``lease_s``: of groups; one without beats for so long is not there."""
        self.plan, self.incarnation, self.state, self.journal = plan, incarnation, state, journal
        self.waiting = WaitingRequests()
        self.presence = GroupPresence(plan.groups, lease_s, time.monotonic())
        self.beats = Beats()
        self.relays = Relays()
        self.save_clock = SaveClock(CheckpointConfig())
        self.refused_connections = 0
        self.on_report: _OnReport = lambda *_: None
        self.on_show: Callable[[int, list[str]], None] = lambda *_: None
        self.on_first_failure: Callable[[str, str, str, str, str], None] = lambda *_: None
        self.on_resume: Callable[[int], None] = lambda _: None

    def handle(self, request: Request) -> Any:
        """Answer to a request. Refused or NotYet: there is none, or not yet."""
        schema = SCHEMAS.get(request.op)
        if schema is None:
            raise Refused("refused", f"unknown request {request.op!r:.40}")
        group, incarnation = request.owner
        if incarnation == OBSERVER_INCARNATION and request.op not in _FOR_OBSERVERS:
            raise Refused(
                "refused", f"{request.op}: not for an observer, allowed {', '.join(_FOR_OBSERVERS)}"
            )
        members = self.state.members
        if (
            lowest := members.lowest_allowed(request.owner)
            if incarnation != OBSERVER_INCARNATION
            else 0
        ):
            raise Refused(
                "fenced",
                f"{group} incarnation {incarnation} is over: only incarnation {lowest} or later "
                "may go on",
            )
        if complaint := schema.complaint(request.args):
            raise Refused("refused", f"{request.op}: malformed arguments: {complaint}")
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

    def look_for_members(self) -> None:
        """Look which members are there; while one is not, or a disk is full, clocks stand."""
        full, now = bool(self.beats.disk_wait()), time.monotonic()
        self.presence.update(self.beats.latest, self.state.members.lowest_allowed, now, full)

    def record(self, **record: Any) -> None:
        """Carry out a record, and journal it."""
        try:
            self.state.apply(record)
        except Exception as error:
            # It is not journaled: its replay would fail for ever.
            raise BrokenStateError(
                f"{record['op']}: cannot be applied: {type(error).__name__}: {error}"
            ) from error
        self.journal.append(record)
