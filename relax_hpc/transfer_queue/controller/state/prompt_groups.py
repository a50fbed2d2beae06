"""All prompt groups that are not retired: who generates them, which fields are there, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from relax_hpc.transfer_queue.lengths import unpacked
from relax_hpc.transfer_queue.records import FieldBits, Part, PromptGroup


class PromptGroups(dict[int, PromptGroup]):
    """By ticket."""

    def shards_of(self, tickets: Iterable[int]) -> Counter[int]:
        """Numbers of the shards in which they lie, and how many of them in each."""
        return Counter([number for ticket in tickets for number, _ in self[ticket].parts])

    def dump(self) -> Any:
        """Part by part, which many of them have in common, and the groups."""
        parts = {part: n for n, part in enumerate(dict.fromkeys(part for g in self.values() for part in g.parts))}
        groups = [
            (
                (ticket, g.owner, g.attempt, g.filtered, g.last, g.place),
                (g.lengths, list(g.versions), g.old_version, [parts[part] for part in g.parts]),
            )
            for ticket, g in self.items()
        ]
        return list(parts), groups

    def load(self, values: Any, bits: FieldBits, samples: int) -> None:
        parts: list[Part] = [(number, tuple(fields)) for number, fields in values[0]]
        for (ticket, owner, attempt, filtered, last, place), (lengths, versions, old_version, numbers) in values[1]:
            width = max(unpacked(lengths, samples)) if lengths else 0
            who = (owner[0], owner[1]) if owner else None
            group = PromptGroup(who, attempt, filtered, width, lengths, shared(tuple(versions)), old_version)
            group.last, group.place = last, place
            group.parts = tuple(parts[number] for number in numbers)
            for _, fields in group.parts:
                group.present |= bits.of(fields)
            self[ticket] = group


@lru_cache(maxsize=4096)
def shared(codes: tuple[int, ...]) -> frozenset[int]:
    """One object for all prompt groups with the same versions."""
    return frozenset(codes)
