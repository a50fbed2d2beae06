"""The shards in use: by prompt groups that have fields in them, and by leases that may still read
them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from relax_hpc.queue.records import Owner, Shard


@dataclass(slots=True)
class Shards:
    """Shards by number. A shard without users is garbage, and its number is never used again."""

    by_number: dict[int, Shard] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    """Numbers by the name of the shard."""
    unsaved: dict[Owner, set[int]] = field(default_factory=dict)
    """Numbers of shards that are not on disk, by owner."""
    next: int = 1
    untrained_bytes: int = 0
    """Bytes of shards with rows that wait for training."""
    garbage: list[str] = field(default_factory=list, compare=False)
    """Names of files to delete. `take_garbage` empties the list."""

    def __getitem__(self, number: int) -> Shard:
        return self.by_number[number]

    def add(self, shard: Shard) -> int:
        """Add ``shard``, whose counts are already set; its number."""
        number, self.next = self.next, self.next + 1
        self.restore(number, shard)
        return number

    def restore(self, number: int, shard: Shard) -> None:
        """Add ``shard`` under the number that it had before."""
        self.by_number[number] = shard
        self.numbers[shard.descriptor["name"]] = number
        if shard.unsaved:
            self.unsaved.setdefault(shard.owner, set()).add(number)
        if shard.untrained:
            self.untrained_bytes += shard.bytes

    def count_untrained(self, number: int, change: int) -> None:
        """Change the number of prompt groups of the shard that wait for training."""
        shard = self.by_number[number]
        before, shard.untrained = shard.untrained, shard.untrained + change
        self.untrained_bytes += shard.bytes * (bool(shard.untrained) - bool(before))

    def drop(self, number: int, count: int, untrained: int) -> None:
        """Remove ``count`` prompt groups from its users; ``untrained`` of them waited for
        training."""
        if untrained:
            self.count_untrained(number, -untrained)
        self.by_number[number].needed -= count
        self._collect(number)

    def hold(self, numbers: Iterable[int]) -> None:
        """Add a lease to the users of these shards."""
        for number in numbers:
            self.by_number[number].leases += 1

    def release(self, numbers: Iterable[int]) -> None:
        """Remove a lease from the users of these shards."""
        for number in numbers:
            self.by_number[number].leases -= 1
            self._collect(number)

    def mark_saved(self, number: int) -> tuple[int, ...]:
        """Record that the shard is on disk, or lost; the tickets that waited for it."""
        shard = self.by_number[number]
        tickets, shard.unsaved = shard.unsaved, ()
        self._forget_unsaved(number, shard)
        return tickets

    def unsaved_of_group(self, group: str, below: int) -> list[int]:
        """Shards not on disk that incarnations of ``group`` before incarnation ``below`` have
        put."""
        unsaved: set[int] = set()
        for (owner_group, incarnation), numbers in self.unsaved.items():
            if owner_group == group and incarnation < below:
                unsaved |= numbers
        return sorted(unsaved)

    def waits_for_disk(self, tickets: Collection[int]) -> bool:
        """Whether a row of ``tickets`` is not on disk."""
        numbers = list(chain.from_iterable(self.unsaved.values()))
        wanted = frozenset(tickets) if numbers else frozenset()
        return any(not wanted.isdisjoint(self.by_number[number].unsaved) for number in numbers)

    def take_garbage(self) -> list[str]:
        """Take the names of files to delete."""
        garbage, self.garbage = self.garbage, []
        return garbage

    def _forget_unsaved(self, number: int, shard: Shard) -> None:
        numbers = self.unsaved.get(shard.owner)
        if numbers:
            numbers.discard(number)
            if not numbers:
                del self.unsaved[shard.owner]

    def _collect(self, number: int) -> None:
        shard = self.by_number[number]
        if not shard.needed and not shard.leases:
            del self.by_number[number], self.numbers[shard.descriptor["name"]]
            self._forget_unsaved(number, shard)
            self.garbage.append(shard.descriptor["name"])

    def dump(self) -> Any:
        """Values for a snapshot, without the numbers of users: these follow from prompt groups,
        leases and logs of segments."""
        shards = [
            (n, s.descriptor, s.fields, s.owner, s.unsaved) for n, s in self.by_number.items()
        ]
        return self.next, shards

    def load(self, values: Any) -> None:
        """Load the values of a dump. `restore` must follow for each shard, after its `needed`,
        `untrained` and `leases` are counted."""
        self.next = values[0]
        for number, descriptor, fields, owner, unsaved in values[1]:
            self.by_number[number] = Shard(
                descriptor, tuple(fields), (owner[0], owner[1]), tuple(unsaved)
            )
