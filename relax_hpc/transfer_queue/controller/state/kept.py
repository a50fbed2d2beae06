"""What is kept of prompt groups that are not accepted yet, so that no token of it is generated again.

Parts of a prompt group in generation belong to its ticket: whoever is admitted to it next goes on with them. Surplus
groups are whole, and were not wanted when they came: each waits for a ticket of a step that may be trained on it.
Every token that was kept is in one place: used, still kept, generated again all the same, or lost with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Handed = tuple[int, int, Sequence[Sequence[int]], Sequence[int], int]
"""Of a prompt group that is handed over: ticket, attempt, [sample, tokens of its response, whether it is finished],
`Version.encode` of what sampled them, and how many tokens that were kept before are among them."""


@dataclass(slots=True)
class KeptGroup:
    """What there is of one attempt at a prompt group."""

    source: int
    """The ticket in the ids of its rows: not the one that it is for, if it was surplus."""
    attempt: int
    versions: frozenset[int] = frozenset()
    samples: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Sample -> number of the shard, tokens of the response, 1 if it is finished."""
    reused: int = 0
    """Tokens of it in the rows that were put last and are not saved yet."""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.samples.values())

    @property
    def shards(self) -> Counter[int]:
        """Numbers of the shards where it lies, and how many samples in each."""
        return Counter(number for number, _, _ in self.samples.values())


@dataclass(slots=True)
class Kept:
    """All that is kept. Counts are tokens of responses."""

    groups: dict[int, KeptGroup] = field(default_factory=dict)
    """By ticket."""
    surplus: dict[int, KeptGroup] = field(default_factory=dict)
    """By number, the oldest first."""
    next_number: int = 1
    total: int = 0
    """All that were ever kept."""
    used: int = 0
    """In rows that were accepted."""
    again: int = 0
    """Generated again although they were kept."""
    lost: Counter[str] = field(default_factory=Counter)
    """By reason."""

    @property
    def held(self) -> int:
        return sum(group.tokens for group in (*self.groups.values(), *self.surplus.values()))

    def counts(self) -> dict[str, int]:
        """What became of all tokens that were ever kept; those that were lost as `lost/<reason>`."""
        found = {"total": self.total, "used": self.used, "held": self.held, "again": self.again}
        return found | {f"lost/{reason}": tokens for reason, tokens in sorted(self.lost.items())}

    def shards(self) -> Counter[int]:
        """Numbers of all shards, and how many samples in each."""
        return sum((group.shards for group in (*self.groups.values(), *self.surplus.values())), Counter())

    def merge(self, group: KeptGroup, number: int, handed: Handed) -> Counter[int]:
        """Lay what lies in shard ``number`` over ``group``; the shards that it replaces, how many samples in each."""
        _, _, samples, versions, reused = handed
        replaced: Counter[int] = Counter()
        before = 0
        for k, tokens, finished in samples:
            if k in group.samples:
                old, known, _ = group.samples[k]
                replaced[old] += 1
                before += known
            group.samples[k] = (number, tokens, finished)
        group.versions |= frozenset(versions)
        self.total += sum(tokens for _, tokens, _ in samples) - reused
        self.again += before - reused
        return replaced

    def dump(self) -> Any:
        counts = (self.next_number, self.total, self.used, self.again, dict(self.lost))
        return _plain(self.groups), _plain(self.surplus), counts

    def load(self, values: Any) -> None:
        self.groups, self.surplus = _groups(values[0]), _groups(values[1])
        self.next_number, self.total, self.used, self.again, lost = values[2]
        self.lost = Counter(lost)


def _plain(groups: dict[int, KeptGroup]) -> Any:
    return {n: (g.source, g.attempt, list(g.versions), g.samples, g.reused) for n, g in groups.items()}


def _groups(found: dict[int, list]) -> dict[int, KeptGroup]:
    return {
        number: KeptGroup(source, attempt, frozenset(versions), {k: tuple(at) for k, at in samples.items()}, reused)
        for number, (source, attempt, versions, samples, reused) in found.items()
    }
