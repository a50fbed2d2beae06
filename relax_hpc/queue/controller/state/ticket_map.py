"""Collections by ticket. Tickets are dense and ascend, so an array of bytes takes less memory than
a dictionary and is searched faster.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence


class TicketMap:
    """A small number (0 to 255) for every ticket; 0 if none was set.

    >>> marks = TicketMap()
    >>> marks[7] = 2
    >>> marks[7], marks[8], marks.find(2, 0), marks.find(2, 8)
    (2, 0, 7, -1)
    """

    __slots__ = ("_base", "_bytes")

    def __init__(self, base: int = 0, values: bytes = b"") -> None:
        self._base, self._bytes = base, bytearray(values)

    def __getitem__(self, ticket: int) -> int:
        at = ticket - self._base
        return self._bytes[at] if 0 <= at < len(self._bytes) else 0

    def __setitem__(self, ticket: int, value: int) -> None:
        at = ticket - self._base
        if not 0 <= at < len(self._bytes):
            at = self._cover(ticket)
        self._bytes[at] = value

    def change(self, tickets: Sequence[int], old: int, new: int) -> None:
        """Set ``new`` for those of ``tickets`` that have ``old``. Ascending tickets without gaps
        are changed in one operation."""
        if not tickets:
            return
        first, count = tickets[0], len(tickets)
        if tickets[-1] - first + 1 == count and (
            count < 3 or list(tickets) == list(range(first, first + count))
        ):
            self._cover(first)
            end = self._cover(first + count - 1) + 1
            run = self._bytes[end - count : end]
            self._bytes[end - count : end] = run.replace(bytes((old,)), bytes((new,)))
            return
        for ticket in tickets:
            if self[ticket] == old:
                self[ticket] = new

    def _cover(self, ticket: int) -> int:
        if not self._bytes:
            self._base = ticket
        if ticket < self._base:
            self._bytes[:0] = bytes(self._base - ticket)
            self._base = ticket
        at = ticket - self._base
        if at >= len(self._bytes):
            self._bytes.extend(bytes(at + 1 - len(self._bytes)))
        return at

    def find(self, value: int, start: int, end: int | None = None) -> int:
        """The lowest ticket from ``start`` on, and below ``end``, that has ``value`` (not 0); -1 if
        no ticket has it."""
        stop = None if end is None else max(0, end - self._base)
        at = self._bytes.find(value, max(0, start - self._base), stop)
        return at + self._base if at >= 0 else -1

    def lowest_unset(self, start: int) -> int:
        """Lowest ticket from ``start`` on that has 0."""
        if not self._base <= start < self.end:
            return start
        at = self._bytes.find(0, start - self._base)
        return at + self._base if at >= 0 else self.end

    @property
    def end(self) -> int:
        """Ticket from which on all have 0."""
        return self._base + len(self._bytes)

    def count(self, value: int) -> int:
        """Number of tickets that have ``value`` (not 0)."""
        return self._bytes.count(value)

    def each(self, value: int, start: int, end: int) -> Iterator[int]:
        """All tickets from ``start`` on and below ``end`` that have ``value`` (not 0),
        ascending."""
        stop, at = max(0, end - self._base), max(0, start - self._base)
        at = self._bytes.find(value, at, stop)
        while at >= 0:
            yield at + self._base
            at = self._bytes.find(value, at + 1, stop)

    def forget(self, below: int) -> None:
        """Set all tickets lower than ``below`` to 0, and free their memory."""
        count = max(0, below - self._base)
        del self._bytes[:count]
        self._base += count

    def dump(self) -> list:
        """[first ticket, a byte for it and each one after it]; the arguments of an equal map."""
        values = bytes(self._bytes.lstrip(b"\0"))
        return (
            [self._base + len(self._bytes) - len(values), values.rstrip(b"\0")]
            if values
            else [0, b""]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TicketMap) and self.dump() == other.dump()


class TicketSet:
    """A set of tickets that gives the lowest ones first.

    >>> tickets = TicketSet([9, 4, 6])
    >>> tickets.lowest(2), tickets.lowest(5, end=9), len(tickets)
    ([4, 6], [4, 6], 3)
    """

    __slots__ = ("_count", "_low", "_map")

    def __init__(self, tickets: Iterable[int] = ()) -> None:
        self._map, self._count, self._low = TicketMap(), 0, 0
        for ticket in tickets:
            self.add(ticket)

    def add(self, ticket: int) -> None:
        if not self._map[ticket]:
            self._low = min(self._low, ticket) if self._count else ticket
            self._map[ticket] = 1
            self._count += 1

    def discard(self, ticket: int) -> None:
        if self._map[ticket]:
            self._map[ticket] = 0
            self._count -= 1
            if ticket == self._low and self._count:
                self._low = self._map.find(1, ticket)
            elif not self._count:
                self._map = TicketMap()

    def lowest(self, count: int, end: int | None = None) -> list[int]:
        """The ``count`` lowest tickets below ``end``, or all if there are fewer."""
        if not self._count:
            return []
        end = self._map.end if end is None else end
        return list(itertools.islice(self._map.each(1, self._low, end), max(0, count)))

    def __iter__(self) -> Iterator[int]:
        return self._map.each(1, self._low, self._map.end)

    def __contains__(self, ticket: int) -> bool:
        return bool(self._map[ticket])

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TicketSet) and self._map == other._map


class AgedTickets:
    """Tickets in the order in which they were added, with the time of that. Times do not count in a
    comparison."""

    __slots__ = ("_since",)

    def __init__(self, tickets: Iterable[int] = ()) -> None:
        self._since: dict[int, float] = {}
        self.add(tickets)

    def add(self, tickets: Iterable[int]) -> None:
        self._since.update(dict.fromkeys(tickets, time.monotonic()))

    def discard(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self._since.pop(ticket, None)

    def oldest_s(self) -> float:
        """Age of the oldest entry in seconds; 0 if it is empty."""
        since = next(iter(self._since.values()), None)
        return 0.0 if since is None else time.monotonic() - since

    def __iter__(self) -> Iterator[int]:
        return iter(self._since)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._since

    def __len__(self) -> int:
        return len(self._since)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AgedTickets) and self._since.keys() == other._since.keys()
