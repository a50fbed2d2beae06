"""Records of the controller: prompt groups, leases, shards and events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.lengths import unpack_lengths
from relax_hpc.queue.samplers import Assignment, GroupSize

Owner = tuple[str, int]
"""A group and its incarnation."""
Cause = tuple[str, str]
"""Role for which a process waits, and the reason, in few words that are the same in every step."""
OBSERVER_INCARNATION = 0
"""Incarnation of clients that only read: they belong to no group and may change nothing."""
NO_STEP = -1
"""Number that means "no step yet", or "no position in the order of training"."""
FILTERED = "filtered"
"""Reason of a dropped attempt that is not a failure of the attempt."""
MAX_SHARD_BYTES = 1 << 42
"""Upper bound of the size of a shard, whatever its descriptor says, so that sums fit into a
message."""
ShardFields = tuple[int, tuple[str, ...]]
"""A shard's number and the fields in it. All prompt groups of the shard share one object."""


@dataclass(slots=True)
class PromptGroup:
    """All episodes of one prompt: their owner, their rows and fields, and the shards of these."""

    owner: Owner | None
    """Group and incarnation that generate it; None: it is not being generated."""
    attempt: int = 0
    filtered: int = 0
    """Earlier attempts that a filter dropped."""
    lengths: bytes = b""
    """Tokens of every row, see `queue.lengths`."""
    media: bytes = b""
    """Tokens of every row that stand for media, then the tokens of all its distinct media, encoded
    as `lengths`; empty: it has none."""
    episodes: bytes = b""
    """Rows of each episode, see `queue.row_ids`; empty until they are declared."""
    versions: frozenset[int] = frozenset()
    old_version: int = 0
    last_step: int = NO_STEP
    """Number of the last step that may train it: the oldest version of its tokens + max_staleness.
    While it is generated, the version that its engine serves counts too. NO_STEP: not limited
    yet."""
    position: int = NO_STEP
    """Position in the order of training, once it is in a step's set; see `planning.step_sets`."""
    present: int = 0
    """Fields that are present, as a mask of `FieldBits`."""
    parts: tuple[ShardFields, ...] = ()
    """Shards with its fields, oldest first."""

    def has(self, bits: int) -> bool:
        """Whether all fields of the mask are present."""
        return self.present & bits == bits

    def declare(
        self, lengths: bytes, episodes: bytes, versions: frozenset[int], media: bytes = b""
    ) -> None:
        """Set its rows: their lengths, the number in each episode, the versions that sampled them,
        and the tokens of their media."""
        self.lengths, self.episodes, self.versions, self.media = lengths, episodes, versions, media

    @property
    def rows(self) -> int:
        """Number of its rows, as declared."""
        return sum(self.episodes)

    @property
    def row_tokens(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return unpack_lengths(self.lengths, sum(self.episodes))

    @property
    def size(self) -> GroupSize:
        """Size by which its rows are assigned to ranks."""
        if not self.media:
            return GroupSize(self.row_tokens, (0,) * self.rows, 0)
        *media, distinct = unpack_lengths(self.media, self.rows + 1)
        return GroupSize(self.row_tokens, media, distinct)

    @property
    def failures(self) -> int:
        """Earlier attempts that failed."""
        return self.attempt - self.filtered


@dataclass(slots=True)
class Lease:
    """Tickets that a consumer holds. `key` names the request, so that a repeated request gets the
    same answer."""

    task: str
    owner: Owner
    key: str
    tickets: tuple[int, ...]
    shards: tuple[int, ...]
    """Numbers of the shards that had its fields at the time of the claim. Their files are kept
    until the lease ends, even if rows are dropped."""
    assignment: Assignment = field(default_factory=list)
    """Assignment of the rows of `tickets` to ranks; empty if the holder assigns them itself."""


@dataclass(slots=True)
class Shard:
    """The bytes of a put: where they are, and how many users they have."""

    descriptor: dict[str, Any]
    fields: tuple[str, ...]
    owner: Owner
    """Group and incarnation that put it."""
    unsaved: tuple[int, ...] = ()
    """Tickets whose rows would be lost if the owner died now; empty once the shard is on disk."""
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
    """Maps field names to bits, so that a set of fields is one integer.

    >>> bits = FieldBits(["token_ids", "reward"])
    >>> bits.mask(("reward",)), bits.mask(("reward", "score"))
    (2, 6)
    """

    __slots__ = ("_bits", "_masks")

    def __init__(self, names: Iterable[str]) -> None:
        self._bits = {name: 1 << number for number, name in enumerate(dict.fromkeys(names))}
        self._masks: dict[tuple[str, ...], int] = {}

    def mask(self, names: tuple[str, ...]) -> int:
        """The sum of the bits of ``names``. Unknown names get the next free bits."""
        mask = self._masks.get(names)
        if mask is None:
            bits = [self._bits.setdefault(name, 1 << len(self._bits)) for name in names]
            mask = self._masks[names] = sum(set(bits))
        return mask

    @property
    def names(self) -> list[str]:
        """Names of the fields, in the order of their bits."""
        return list(self._bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FieldBits) and self._bits == other._bits
