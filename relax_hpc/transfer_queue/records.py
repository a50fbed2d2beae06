"""What the controller keeps: prompt groups, leases, shards, and the events it tells of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Owner = tuple[str, int]
"""A group and the epoch of its incarnation."""
OBSERVER_EPOCH = 0
"""Epoch of clients that only look: they are no group and may change nothing."""
DONE = -1
"""In place of a lease number: the task has consumed the prompt group."""


@dataclass(slots=True)
class PromptGroup:
    """One prompt's samples: who generates them, which fields are there, and which task holds or has consumed them."""

    owner: Owner | None
    attempt: int = 0
    width: int = 0
    versions: frozenset[int] = frozenset()
    old_version: int = 0
    present: dict[str, int] = field(default_factory=dict)
    """Field -> bit mask of the samples that have it."""
    parts: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    """(shard number, its fields), oldest first."""
    tasks: dict[str, int] = field(default_factory=dict)
    """Task -> lease number, or DONE."""


@dataclass(slots=True)
class Lease:
    """Tickets that a consumer holds. `key` names the request, so that asking again gives the same answer."""

    task: str
    owner: Owner
    key: str
    tickets: tuple[int, ...]
    shards: frozenset[int]
    """Where the rows lay when they were claimed: files stay as long as the lease, even of dropped rows."""


@dataclass(slots=True)
class Shard:
    """Where a put's bytes are, the tickets that still need them, and how many leases may still read them."""

    descriptor: dict[str, Any]
    tickets: set[int]
    leases: int = 0


@dataclass(slots=True)
class Event:
    """One line of events.jsonl."""

    id: str
    what: str
    step: int
    version: str = ""
    reason: str = ""
