"""Tickets that are not trained yet, and the records that admit them, fail them and return them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.prompt_groups import reissue
from relax_hpc.queue.controller.state.segments import bind, lose_log
from relax_hpc.queue.controller.state.ticket_map import AgedTickets, TicketSet
from relax_hpc.queue.records import FILTERED, NO_STEP, Owner, PromptGroup

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@dataclass(slots=True)
class Tickets:
    """Tickets by what has to be done for them next."""

    next: int = 0
    """Lowest ticket that was never admitted."""
    reissued: TicketSet = field(default_factory=TicketSet)
    """Tickets of `generating` that were taken back and have no owner."""
    generating: AgedTickets = field(default_factory=AgedTickets)
    """Tickets whose prompt groups have no rows."""
    untrained: AgedTickets = field(default_factory=AgedTickets)
    """Tickets whose prompt groups have rows that wait for training."""
    untrained_rows: int = 0
    """Number of rows of all `untrained`."""

    def admit(self, tickets: Sequence[int]) -> None:
        """Count ``tickets`` as being generated."""
        for ticket in tickets:
            self.reissued.discard(ticket)
        self.next = max(self.next, *(ticket + 1 for ticket in tickets)) if tickets else self.next
        self.generating.discard(tickets)
        self.generating.add(tickets)

    def store(self, tickets: Sequence[int], rows: int) -> None:
        """Count ``tickets``, whose ``rows`` rows were put, as waiting for training."""
        self.generating.discard(tickets)
        self.wait(tickets, rows)

    def wait(self, tickets: Iterable[int], rows: int) -> None:
        """Count ``tickets``, with ``rows`` rows together, as waiting for training."""
        self.untrained.add(tickets)
        self.untrained_rows += rows

    def end_wait(self, tickets: Sequence[int], rows: int) -> None:
        """Remove ``tickets``, all of which waited for training, from the waiting ones."""
        self.untrained.discard(tickets)
        self.untrained_rows -= rows

    def depth(self) -> dict[str, int]:
        """Number of prompt groups in generation, waiting for training, and to be admitted again."""
        return {
            "generating": len(self.generating),
            "ready": len(self.untrained),
            "reissued": len(self.reissued),
        }

    def dump(self) -> Any:
        """Values for a snapshot. The lists of the other tickets follow from their prompt groups."""
        return self.next, list(self.reissued)

    def load(self, values: Any) -> None:
        self.next, self.reissued = values[0], TicketSet(values[1])


@applies("admit")
def admit(
    state: QueueState,
    owner: Owner,
    key: str,
    tickets: list[int],
    version: str,
    spares: Mapping[int, int] | None = None,
) -> None:
    groups = state.groups
    last = Version.parse(version).number + state.plan.max_staleness
    for ticket in tickets:
        group = groups.setdefault(ticket, PromptGroup(owner))
        group.owner = owner
        log_last = state.last_step(state.segments.versions(ticket))
        group.last_step = last if log_last == NO_STEP else min(last, log_last)
    state.tickets.admit(tickets)
    state.events.add("admitted", tickets, version)
    bind(state, spares or {})
    state.admissions.remember(key, owner, tickets)


@applies("fail")
def fail(state: QueueState, ticket: int, reason: str) -> None:
    state.groups[ticket].attempt += 1
    state.groups[ticket].filtered += reason == FILTERED
    lose_log(state, ticket, reason)
    state.counts.dropped[reason] += len(state.plan.undeclared)
    state.events.add("failed", [ticket], reason=reason)


def free_tickets_of(state: QueueState, group: str, below: int) -> None:
    """Free the tickets of incarnations of ``group`` before incarnation ``below``."""
    for ticket in sorted(state.tickets.generating):
        owner_group, incarnation = state.groups[ticket].owner or ("", 0)
        if owner_group == group and incarnation < below:
            _free(state, ticket)


@applies("give_back")
def return_ticket(state: QueueState, owner: Owner, key: str, ticket: int) -> None:
    _free(state, ticket)
    state.admissions.remember(key, owner, [ticket])


def _free(state: QueueState, ticket: int) -> None:
    state.groups[ticket].owner = None
    reissue(state, ticket)
