"""Changes of tickets: they are given out, fail, and are taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.changes.prompt_groups import reissue
from relax_hpc.queue.controller.changes.segments import bind, lose_log
from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.records import FILTERED, NO_STEP, Owner, PromptGroup

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


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
        known = state.last_step(state.segments.versions(ticket))
        group.last = last if known == NO_STEP else min(last, known)
    state.tickets.admit(tickets)
    state.events.tell("admitted", tickets, version)
    bind(state, spares or {})
    state.admissions.remember(key, owner, tickets)


@applies("fail")
def fail(state: QueueState, ticket: int, reason: str) -> None:
    state.groups[ticket].attempt += 1
    state.groups[ticket].filtered += reason == FILTERED
    lose_log(state, ticket, reason)
    state.counts.dropped[reason] += len(state.plan.undeclared)
    state.events.tell("failed", [ticket], reason=reason)


def take_back(state: QueueState, group: str, below: int) -> None:
    """The tickets of incarnations of ``group`` before incarnation ``below``."""
    for ticket in sorted(state.tickets.generating):
        who, incarnation = state.groups[ticket].owner or ("", 0)
        if who == group and incarnation < below:
            _free(state, ticket)


@applies("give_back")
def give_back(state: QueueState, owner: Owner, key: str, ticket: int) -> None:
    _free(state, ticket)
    state.admissions.remember(key, owner, [ticket])


def _free(state: QueueState, ticket: int) -> None:
    state.groups[ticket].owner = None
    reissue(state, ticket)
