"""The shards that somebody needs: prompt groups whose fields lie in them, and leases that may still
read them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.records import Owner, Shard


@dataclass(slots=True)
class Shards:
    """Shards by number. One that nobody needs any more is garbage, and its number is never used
    again."""

    by_number: dict[int, Shard] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    """Numbers by the name of the shard."""
    unsaved: dict[Owner, set[int]] = field(default_factory=dict)
    """Numbers of shards that are not on disk, by who put them."""
    next: int = 1
    untrained_bytes: int = 0
    """Bytes of shards with rows that wait for training."""
    garbage: list[str] = field(default_factory=list, compare=False)
    """Names of files to be removed; whoever removes them empties the list."""

    def __getitem__(self, number: int) -> Shard:
        return self.by_number[number]

    def add(self, shard: Shard) -> int:
        """Keep ``shard``, whose counts are right already; its number."""
        number, self.next = self.next, self.next + 1
        self.put_back(number, shard)
        return number

    def put_back(self, number: int, shard: Shard) -> None:
        """Keep ``shard`` under a number that it was given before."""
        self.by_number[number] = shard
        self.numbers[shard.descriptor["name"]] = number
        if shard.unsaved:
            self.unsaved.setdefault(shard.owner, set()).add(number)
        if shard.untrained:
            self.untrained_bytes += shard.bytes

    def count_untrained(self, number: int, change: int) -> None:
        """Count ``change`` more prompt groups of the shard, or fewer, as waiting for training."""
        shard = self.by_number[number]
        before, shard.untrained = shard.untrained, shard.untrained + change
        self.untrained_bytes += shard.bytes * (bool(shard.untrained) - bool(before))

    def drop(self, number: int, count: int, untrained: int) -> None:
        """``count`` prompt groups need it no more, of which ``untrained`` waited for training."""
        if untrained:
            self.count_untrained(number, -untrained)
        self.by_number[number].needed -= count
        self._collect(number)

    def hold(self, numbers: Iterable[int]) -> None:
        """Count a lease as needing these shards."""
        for number in numbers:
            self.by_number[number].leases += 1

    def let_go(self, numbers: Iterable[int]) -> None:
        """Count a lease as ended."""
        for number in numbers:
            self.by_number[number].leases -= 1
            self._collect(number)

    def saved(self, number: int) -> tuple[int, ...]:
        """Note that the shard is on disk, or lost; the tickets that waited to be accepted."""
        shard = self.by_number[number]
        tickets, shard.unsaved = shard.unsaved, ()
        self._forget_unsaved(number, shard)
        return tickets

    def unsaved_of(self, group: str, below: int) -> list[int]:
        """Shards not on disk that incarnations of ``group`` before incarnation ``below`` put."""
        over = [
            numbers
            for (who, incarnation), numbers in self.unsaved.items()
            if who == group and incarnation < below
        ]
        return sorted(number for numbers in over for number in numbers)

    def waits_for_disk(self, tickets: Collection[int]) -> bool:
        """Whether a row of ``tickets`` is not on disk."""
        shards = [self.by_number[number] for numbers in self.unsaved.values() for number in numbers]
        wanted = frozenset(tickets) if shards else frozenset()
        return any(not wanted.isdisjoint(shard.unsaved) for shard in shards)

    def take_garbage(self) -> list[str]:
        """Take the names of files to be removed."""
        garbage, self.garbage = self.garbage, []
        return garbage

    def _forget_unsaved(self, number: int, shard: Shard) -> None:
        if numbers := self.unsaved.get(shard.owner):
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
        """Values for a snapshot, without who needs the shards: that follows from prompt groups,
        leases and logs of segments."""
        shards = [
            (n, s.descriptor, s.fields, s.owner, s.unsaved) for n, s in self.by_number.items()
        ]
        return self.next, shards

    def load(self, values: Any) -> None:
        """Take the values of a dump. `put_back` has to follow once `needed`, `untrained` and
        `leases` of all are counted."""
        self.next = values[0]
        for number, descriptor, fields, owner, unsaved in values[1]:
            self.by_number[number] = Shard(
                descriptor, tuple(fields), (owner[0], owner[1]), tuple(unsaved)
            )
