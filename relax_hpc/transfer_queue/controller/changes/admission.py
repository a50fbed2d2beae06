"""Tickets are given out, fail, and are taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from relax_hpc.transfer_queue.controller.changes.kept import bind, last_step_of_kept, lose_kept
from relax_hpc.transfer_queue.controller.changes.prompt_groups import reissue
from relax_hpc.transfer_queue.controller.registry import applies
from relax_hpc.transfer_queue.records import FILTERED, Owner, PromptGroup
from relax_hpc.versions import Version

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.controller.state.queue_state import QueueState


@applies("admit")
def admit(
    state: QueueState,
    owner: Owner,
    key: str,
    tickets: list[int],
    version: str,
    surplus: Mapping[int, int] | None = None,
) -> None:
    groups = state.groups
    last = Version.parse(version).number + state.plan.max_staleness
    for ticket in tickets:
        group = groups.setdefault(ticket, PromptGroup(owner))
        group.owner = owner
        group.last = min(last, last_step_of_kept(state, ticket)) if ticket in state.kept.groups else last
    state.tickets.admit(tickets)
    state.events.tell("admitted", tickets, version)
    bind(state, surplus or {})
    state.admissions.remember(key, owner, tickets)


@applies("fail")
def fail(state: QueueState, ticket: int, reason: str) -> None:
    state.groups[ticket].attempt += 1
    state.groups[ticket].filtered += reason == FILTERED
    lose_kept(state, ticket, reason)
    state.counts.dropped[reason] += len(state.plan.undeclared)
    state.events.tell("failed", [ticket], reason=reason)


@applies("spared")
def spare(state: QueueState, key: str, owner: Owner, tickets: list[int], reason: str) -> None:
    state.puts.remember(key, owner, {})
    state.counts.dropped[reason] += len(state.plan.undeclared) * len(tickets)
    state.events.tell("failed", tickets, reason=reason)


def take_back(state: QueueState, group: str, below: int) -> None:
    """The tickets of incarnations of ``group`` before incarnation ``below``."""
    for ticket in sorted(state.tickets.generating):
        who, incarnation = state.groups[ticket].owner or ("", 0)
        if who == group and incarnation < below:
            state.groups[ticket].owner = None
            reissue(state, ticket)
