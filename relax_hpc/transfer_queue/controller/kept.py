"""What is kept of prompt groups that are not accepted yet, so that no token of it is generated again.

Parts of a prompt group in generation belong to its ticket: whoever is admitted to it next goes on with them. Surplus
groups are whole, and were not wanted when they came: each waits for a ticket of a step that may be trained on it.
Every token that was kept is in one place: used, still kept, generated again all the same, or lost with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relax_hpc.transfer_queue.records import NO_STEP

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.controller.stock import Stock

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


class Keeping:
    """The part of a `Stock` that keeps such groups: every method carries out a record that was checked."""

    def _keep(self: Stock, number: int, rows: Iterable[Handed], surplus: bool) -> None:
        """Parts of groups, or whole ones without a ticket, lie in shard ``number``."""
        for handed in rows:
            ticket, attempt = handed[:2]
            if surplus:
                group = self.kept.surplus[self.kept.next_number] = KeptGroup(ticket, attempt)
                self.media.hold(-self.kept.next_number, self.media.of(ticket))
                self.kept.next_number += 1
            else:
                group = self._group_to_keep(ticket, attempt)
            for old, count in self.kept.merge(group, number, handed).items():
                self.shelf.drop(old, count, count)
            self._tell("surplus" if surplus else "kept", [ticket])

    def _group_to_keep(self: Stock, ticket: int, attempt: int) -> KeptGroup:
        """Of ``ticket``; a surplus group that it was given, and that its owner could not use, makes room."""
        group = self.kept.groups.get(ticket)
        if group and (group.source, group.attempt) != (ticket, attempt):
            self.kept.again += group.tokens
            self._leave_shards(group)
            group = None
        self.kept.groups[ticket] = group or KeptGroup(ticket, attempt)
        return self.kept.groups[ticket]

    def _bind(self: Stock, surplus: Mapping[int, int]) -> None:
        """Surplus groups get tickets (ticket -> number): they are parts of these from now on."""
        for ticket, number in surplus.items():
            self.kept.groups[ticket] = self.kept.surplus.pop(number)
            self.groups[ticket].last = min(self.groups[ticket].last, self._last_kept(ticket))
            self.media.hold(ticket, self.media.of(-number))
            self.media.release(-number)

    def _use_kept(self: Stock, tickets: Iterable[int]) -> None:
        """Their rows are accepted, and hold what was kept, or as much of it as their maker knew."""
        for ticket in [ticket for ticket in tickets if ticket in self.kept.groups]:
            group = self.kept.groups.pop(ticket)
            self.kept.used += group.reused
            self.kept.again += group.tokens - group.reused
            self._leave_shards(group)

    def _lose_kept(self: Stock, ticket: int, reason: str) -> None:
        """Another attempt takes its place, or nobody may use it any more."""
        if ticket in self.kept.groups:
            self._lose_group(self.kept.groups.pop(ticket), reason)
            if ticket in self.reissued:
                self.groups[ticket].last = NO_STEP

    def _lose_surplus(self: Stock, number: int, reason: str) -> None:
        self._lose_group(self.kept.surplus.pop(number), reason)
        self.media.release(-number)

    def _lose_group(self: Stock, group: KeptGroup, reason: str) -> None:
        self.kept.lost[reason] += group.tokens
        self._leave_shards(group)
        self._tell("unkept", [group.source], reason=reason)

    def _lose_rolled_back(self: Stock) -> None:
        """After the lineage changed."""
        for ticket in [t for t, group in self.kept.groups.items() if not self.origin(tuple(group.versions))[0]]:
            self._lose_kept(ticket, "rolled_back")
        for number in [n for n, group in self.kept.surplus.items() if not self.origin(tuple(group.versions))[0]]:
            self._lose_surplus(number, "rolled_back")

    def _lose_stale(self: Stock) -> None:
        """Surplus groups that no step which is still to be trained admits, or that come after the last one."""
        for number, group in list(self.kept.surplus.items()):
            if self.trained_steps >= self.plan.steps:
                self._lose_surplus(number, "unwanted")
            elif self.origin(tuple(group.versions))[1] < self.trained_steps - self.plan.max_staleness:
                self._lose_surplus(number, "stale_version")
