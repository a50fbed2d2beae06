"""The controller's request handlers with a journal in memory."""

from __future__ import annotations

from typing import Any

import msgpack

from relax_hpc.queue.controller.messages import Refused, Request
from relax_hpc.queue.controller.service import QueueService
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.waiting import NotYet
from relax_hpc.queue.plan import Plan

IGNORED = ("plan", "events", "woken")
"""Attributes of the queue's state that do not follow from the journal."""


class MemoryJournal(list):
    """A journal in memory. Records are encoded by msgpack, as in a file."""

    def append(self, record: dict[str, Any]) -> None:
        super().append(msgpack.packb(record))


class InMemory(QueueService):
    """A queue service whose journal is in memory."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, 1, QueueState(plan), MemoryJournal())

    def replayed(self) -> QueueState:
        """A new state with all records of the journal applied."""
        state = QueueState(self.plan)
        for record in self.journal:
            state.apply(msgpack.unpackb(record, strict_map_key=False))
        return state

    def restart(self) -> None:
        """Replace the state by a replay of the journal, as after a restart of the controller."""
        batches, garbage = self.state.events.batches, self.state.shards.garbage
        self.state = self.replayed()
        self.state.events.batches, self.state.shards.garbage = batches, garbage

    def ask(self, group: str, incarnation: int, key: str, op: str, /, **args: Any) -> Any:
        """The reply to a request. None if the request has to wait."""
        try:
            return self.handle(
                Request(
                    0, 0, f"{group}-{incarnation}#{key}", (group, incarnation), op, args, 0.0, 0.0
                )
            )
        except NotYet:
            return None


def contents(state: QueueState) -> dict[str, Any]:
    """Attributes of ``state`` that a replay of its journal must restore."""
    return {name: value for name, value in vars(state).items() if name not in IGNORED}


def refused_kind(service: InMemory, *args: Any, **kwargs: Any) -> str:
    """The kind of refusal of a request, or an empty text if it is accepted."""
    try:
        service.ask(*args, **kwargs)
    except Refused as refusal:
        return refusal.kind
    return ""
