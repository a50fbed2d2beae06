"""Records of the controller: prompt groups, leases and shards, and the events it tells of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.lengths import unpacked
from relax_hpc.queue.samplers import Assignment, GroupSize

Owner = tuple[str, int]
"""A group and its incarnation."""
Cause = tuple[str, str]
"""Role that somebody waits for, and why, in few words that are the same in every step."""
OBSERVER_INCARNATION = 0
"""Incarnation of clients that only look: they are no group and may change nothing."""
NO_STEP = -1
"""Number that stands for no step yet, or for no place in the order of training."""
FILTERED = "filtered"
"""Reason why an attempt was dropped that was none of its own faults."""
MAX_SHARD_BYTES = 1 << 42
"""Bytes of a shard that are believed at most, so that sums stay numbers that a message can
carry."""
Part = tuple[int, tuple[str, ...]]
"""A shard's number and the fields in it; one object for all prompt groups of the shard."""


@dataclass(slots=True)
class PromptGroup:
    """One prompt's episodes: who generates them, which rows and fields of them are there, and
    where."""

    owner: Owner | None
    """Group and incarnation that generate it; None: it is not in generation."""
    attempt: int = 0
    filtered: int = 0
    """Earlier attempts that a filter dropped."""
    lengths: bytes = b""
    """Tokens of every row, see `transfer_queue.lengths`."""
    media: bytes = b""
    """Tokens of every row that stand for media, and of all its media together, as `lengths`; empty:
    it has none."""
    episodes: bytes = b""
    """Rows of each episode, see `transfer_queue.row_ids`; empty before somebody has declared it."""
    versions: frozenset[int] = frozenset()
    old_version: int = 0
    last: int = NO_STEP
    """The last step that may train it: the oldest version of its tokens + max_staleness; while it
    is in generation, of the version that its engine serves."""
    place: int = NO_STEP
    """Place in the order of training, once a step's set has it; see `controller.step_sets`."""
    present: int = 0
    """Fields that it has, as `FieldBits`."""
    parts: tuple[Part, ...] = ()
    """Shards with its fields, oldest first."""

    def has(self, bits: int) -> bool:
        """Whether it has all these fields."""
        return self.present & bits == bits

    def declare(
        self, lengths: bytes, episodes: bytes, versions: frozenset[int], media: bytes = b""
    ) -> None:
        """Note its rows: their lengths, those of each episode, the versions that sampled them, and
        their media."""
        self.lengths, self.episodes, self.versions, self.media = lengths, episodes, versions, media

    @property
    def rows(self) -> int:
        """Number of its rows, as declared."""
        return sum(self.episodes)

    @property
    def row_tokens(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return unpacked(self.lengths, sum(self.episodes))

    @property
    def size(self) -> GroupSize:
        """Size by which its rows are dealt to ranks."""
        *media, distinct = (
            unpacked(self.media, self.rows + 1) if self.media else (0,) * (self.rows + 1)
        )
        return GroupSize(self.row_tokens, media, distinct)

    @property
    def failures(self) -> int:
        """Earlier attempts that came to nothing."""
        return self.attempt - self.filtered


@dataclass(slots=True)
class Lease:
    """Tickets that a consumer holds. `key` names the request, so that asking again gives the same
    answer."""

    task: str
    owner: Owner
    key: str
    tickets: tuple[int, ...]
    shards: tuple[int, ...]
    """Numbers of the shards in which its fields lay when they were claimed: files stay as long as
    the lease, even of dropped rows."""
    assignment: Assignment = field(default_factory=list)
    """Assignment of the rows of `tickets` to ranks; empty if the holder deals them out itself."""


@dataclass(slots=True)
class Shard:
    """The bytes of a put, where they are, and who still needs them."""

    descriptor: dict[str, Any]
    fields: tuple[str, ...]
    owner: Owner
    """Group and incarnation that put it."""
    unsaved: tuple[int, ...] = ()
    """Tickets whose rows are lost with the owner as long as the shard is not on disk; empty once it
    is."""
    needed: int = 0
    """Prompt groups that have fields in it."""
    untrained: int = 0
    """Prompt groups that have fields in it and wait for training."""
    leases: int = 0

    @property
    def bytes(self) -> int:
        size = self.descriptor.get("bytes")
        return min(max(0, size), MAX_SHARD_BYTES) if type(size) is int else 0


@dataclass(frozen=True, slots=True)
class Event:
    """One line of events.jsonl."""

    id: str
    what: str
    step: int
    version: str = ""
    reason: str = ""


class FieldBits:
    """Gives each field name a bit, so that the fields of a prompt group are one integer.

    >>> bits = FieldBits(["token_ids", "reward"])
    >>> bits.of(("reward",)), bits.of(("reward", "mine"))
    (2, 6)
    """

    __slots__ = ("_bits", "_sums")

    def __init__(self, names: Iterable[str]) -> None:
        self._bits = {name: 1 << number for number, name in enumerate(dict.fromkeys(names))}
        self._sums: dict[tuple[str, ...], int] = {}

    def of(self, names: tuple[str, ...]) -> int:
        """The sum of the bits of ``names``; unknown ones get the next free bits."""
        found = self._sums.get(names)
        if found is None:
            bits = [self._bits.setdefault(name, 1 << len(self._bits)) for name in names]
            found = self._sums[names] = sum(set(bits))
        return found

    @property
    def names(self) -> list[str]:
        """Names of the fields, in the order of their bits."""
        return list(self._bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FieldBits) and self._bits == other._bits
