"""All prompt groups that are not retired: who generates them, which fields are there, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from relax_hpc.queue.records import FieldBits, Part, PromptGroup


class PromptGroups(dict[int, PromptGroup]):
    """Prompt groups by ticket."""

    def shards_of(self, tickets: Iterable[int]) -> Counter[int]:
        """Numbers of the shards in which they lie, and how many of them in each."""
        return Counter([number for ticket in tickets for number, _ in self[ticket].parts])

    def rows_of(self, tickets: Iterable[int]) -> int:
        """Rows that ``tickets`` have in all."""
        return sum(self[ticket].rows for ticket in tickets)

    def dump(self) -> Any:
        """Part by part, which many of them have in common, and the groups."""
        parts = {
            part: n
            for n, part in enumerate(dict.fromkeys(part for g in self.values() for part in g.parts))
        }
        groups = [
            (
                (ticket, g.owner, g.attempt, g.filtered, g.last, g.place),
                (g.lengths, g.episodes, list(g.versions), g.media),
                (g.old_version, [parts[part] for part in g.parts]),
            )
            for ticket, g in self.items()
        ]
        return list(parts), groups

    def load(self, values: Any, bits: FieldBits) -> None:
        parts: list[Part] = [(number, tuple(fields)) for number, fields in values[0]]
        for (ticket, owner, attempt, filtered, last, place), rows, (old_version, numbers) in values[
            1
        ]:
            group = PromptGroup((owner[0], owner[1]) if owner else None, attempt, filtered)
            group.last, group.place, group.old_version = last, place, old_version
            lengths, episodes, versions, media = rows
            if lengths:
                group.declare(lengths, same_bytes(episodes), shared(tuple(versions)), media)
            group.parts = tuple(parts[number] for number in numbers)
            for _, fields in group.parts:
                group.present |= bits.of(fields)
            self[ticket] = group


@lru_cache(maxsize=4096)
def same_bytes(data: bytes) -> bytes:
    """One object for all prompt groups whose episodes have as many rows."""
    return data


@lru_cache(maxsize=4096)
def shared(codes: tuple[int, ...]) -> frozenset[int]:
    """One object for all prompt groups with the same versions."""
    return frozenset(codes)
