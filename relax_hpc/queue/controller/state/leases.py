"""Leases of consumers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, ValuesView
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.controller.state.prompt_groups import PromptGroups
from relax_hpc.queue.records import Lease
from relax_hpc.queue.samplers import of_rows


@dataclass(slots=True)
class Leases:
    """Leases by number, which is never used again."""

    _held: dict[int, Lease] = field(default_factory=dict)
    by_key: dict[str, int] = field(default_factory=dict)
    """Numbers by the key of the request that asked for the lease."""
    next: int = 1

    def add(self, number: int, lease: Lease) -> None:
        self._held[number] = lease
        self.by_key[lease.key] = number
        self.next = max(self.next, number + 1)

    def end(self, number: int) -> Lease:
        lease = self._held.pop(number)
        self.by_key.pop(lease.key, None)
        return lease

    def of_group(self, group: str, below: int) -> list[int]:
        """Numbers of those that incarnations of ``group`` before incarnation ``below`` hold."""
        return [
            n
            for n, lease in self._held.items()
            if lease.owner[0] == group and lease.owner[1] < below
        ]

    def of_tasks(self, tasks: Collection[str]) -> list[int]:
        """Numbers of the leases of ``tasks``."""
        return [number for number, lease in self._held.items() if lease.task in tasks]

    def shrink(self, tickets: Iterable[int], groups: PromptGroups) -> None:
        """Take ``tickets`` out of all leases."""
        gone = set(tickets)
        for lease in self._held.values():
            if not gone.isdisjoint(lease.tickets):
                holders = (ticket for ticket in lease.tickets for _ in range(groups[ticket].rows))
                rows = [number for number, ticket in enumerate(holders) if ticket not in gone]
                lease.tickets = tuple(ticket for ticket in lease.tickets if ticket not in gone)
                lease.assignment = of_rows(lease.assignment, rows)

    def __getitem__(self, number: int) -> Lease:
        return self._held[number]

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def get(self, number: int) -> Lease | None:
        return self._held.get(number)

    def values(self) -> ValuesView[Lease]:
        return self._held.values()

    def __len__(self) -> int:
        return len(self._held)

    def dump(self) -> Any:
        leases = [
            (n, v.task, v.owner, v.key, v.tickets, v.shards, v.assignment)
            for n, v in self._held.items()
        ]
        return self.next, leases

    def load(self, values: Any) -> None:
        for number, task, owner, key, tickets, shards, assignment in values[1]:
            lease = Lease(
                task, (owner[0], owner[1]), key, tuple(tickets), tuple(shards), assignment
            )
            self.add(number, lease)
        self.next = values[0]
