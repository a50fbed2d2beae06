"""Logs of segments: tokens of attempts at tickets before their rows are accepted, so that they
survive the death of a rollout process.

A log grows by segments while engines generate the attempt. The next owner of the ticket continues
after the last segment. When rows are accepted, their log is used up. A spare is a whole attempt
without a ticket: its log waits for a ticket that can use it. Every appended token is used, held, or
lost with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.topics import ADMISSION
from relax_hpc.queue.records import NO_STEP, Owner, Shard

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


Segment = Sequence[int]
"""New tokens of a row since its last segment: episode, row, tokens that the row had before, number
of new tokens, and 1 if the episode ends with them. Tokens of the prompt are not counted."""
Growth = tuple[int, int, Sequence[Segment], Sequence[int]]
"""Growth of a log: ticket, attempt, segments, and the encoded versions that sampled them."""


@dataclass(slots=True)
class Log:
    """All segments of one attempt."""

    ticket: int
    """Ticket in the ids of its segments. A spare may be bound to another ticket."""
    attempt: int
    versions: frozenset[int] = frozenset()
    shards: list[int] = field(default_factory=list)
    """Numbers of shards, in the order of the segments in them."""
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens by episode and row."""
    ended: set[int] = field(default_factory=set)
    """Episodes that have ended."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths.values())

    def fits(self, segments: Iterable[Segment]) -> bool:
        """Whether ``segments`` continue the log. They may begin before its end with tokens that it
        has: the answer to the earlier append was lost, and the client repeats it."""
        for episode, row, start, tokens, _ in segments:
            length, end = self.lengths.get((episode, row), 0), start + tokens
            if not start <= length <= end or (length < end and episode in self.ended):
                return False
        return True

    def grow(self, shard: int, growth: Growth) -> int:
        """Add segments in ``shard``; the number of new tokens."""
        before = self.tokens
        self.shards.append(shard)
        self.versions |= frozenset(growth[3])
        for episode, row, start, tokens, ended in growth[2]:
            self.lengths[episode, row] = start + tokens
            if ended:
                self.ended.add(episode)
        return self.tokens - before


@dataclass(slots=True)
class Segments:
    """All logs, and the fate of their tokens."""

    logs: dict[int, Log] = field(default_factory=dict)
    """Logs by holder, the oldest first. The holder is the ticket that uses the log, or the negative
    number of a spare."""
    last_spare: int = 0
    appended: int = 0
    """Tokens that were ever appended or refused."""
    used: int = 0
    """Tokens in accepted rows."""
    lost: Counter[str] = field(default_factory=Counter)
    """Tokens that were lost, by reason."""

    @property
    def spares(self) -> list[int]:
        return [holder for holder in self.logs if holder < 0]

    @property
    def held(self) -> int:
        return sum(log.tokens for log in self.logs.values())

    def counts(self) -> dict[str, int]:
        """All tokens by their fate; lost ones under `lost/<reason>`."""
        counts = {"appended": self.appended, "used": self.used, "held": self.held}
        return counts | {f"lost/{reason}": tokens for reason, tokens in sorted(self.lost.items())}

    def shards(self) -> Counter[int]:
        """Numbers of all shards, with the number of logs in each."""
        return Counter(chain.from_iterable(log.shards for log in self.logs.values()))

    def versions(self, holder: int) -> frozenset[int]:
        """Versions that sampled the holder's log; empty if it has no log."""
        log = self.logs.get(holder)
        return log.versions if log else frozenset()

    def append(self, shard: int, growth: Growth, spare: bool) -> int:
        """Add segments in ``shard`` to a log, or to a new log of a spare; the log's holder."""
        ticket, attempt, *_ = growth
        self.last_spare -= spare
        holder = self.last_spare if spare else ticket
        self.appended += self.logs.setdefault(holder, Log(ticket, attempt)).grow(shard, growth)
        return holder

    def refuse(self, growth: Growth, reason: str) -> None:
        tokens = sum(segment[3] for segment in growth[2])
        self.appended += tokens
        self.lost[reason] += tokens

    def use(self, holder: int) -> Log:
        """Remove a holder's log, whose rows are accepted."""
        log = self.logs.pop(holder)
        self.used += log.tokens
        return log

    def lose(self, holder: int, reason: str) -> Log:
        """Remove a log that no attempt can continue."""
        log = self.logs.pop(holder)
        self.lost[reason] += log.tokens
        return log

    def dump(self) -> Any:
        logs = [
            (
                holder,
                v.ticket,
                v.attempt,
                list(v.versions),
                v.shards,
                list(v.lengths.items()),
                list(v.ended),
            )
            for holder, v in self.logs.items()
        ]
        return logs, self.last_spare, self.appended, self.used, dict(self.lost)

    def load(self, values: Any) -> None:
        logs, self.last_spare, self.appended, self.used, lost = values
        self.lost = Counter(lost)
        for holder, ticket, attempt, versions, shards, lengths, ended in logs:
            tokens_by_row = {(episode, row): tokens for (episode, row), tokens in lengths}
            self.logs[holder] = Log(
                ticket, attempt, frozenset(versions), list(shards), tokens_by_row, set(ended)
            )


@applies("append")
def append(
    state: QueueState,
    key: str,
    owner: Owner,
    shard: dict,
    fields: list[str],
    growths: list[Growth],
    spare: bool,
    refused: dict[int, str],
) -> None:
    state.puts.remember(key, owner, refused)
    taken = [growth for growth in growths if growth[0] not in refused]
    if taken:
        number = state.shards.add(Shard(shard, tuple(fields), owner, (), len(taken), len(taken)))
    else:
        state.shards.garbage.append(shard["name"])
    for growth in growths:
        ticket = growth[0]
        if ticket in refused:
            state.segments.refuse(growth, refused[ticket])
            continue
        holder = state.segments.append(number, growth, spare)
        if holder < 0:
            state.media.hold(holder, state.media.media_of(ticket))
    state.events.add("spared" if spare else "appended", [growth[0] for growth in taken])


@applies("drop_attempt")
def drop_attempt(
    state: QueueState, key: str, owner: Owner, ticket: int, spare: bool, reason: str
) -> None:
    state.puts.remember(key, owner, {})
    if spare:
        state.counts.dropped[reason] += len(state.plan.undeclared)
        state.events.add("failed", [ticket], reason=reason)
    else:
        lose_log(state, ticket, reason)


@applies("bind")
def bind(state: QueueState, spares: Mapping[int, int]) -> None:
    """Bind tickets to spares: the rows of a ticket will be those of its spare."""
    for ticket, spare in spares.items():
        state.segments.logs[ticket] = state.segments.logs.pop(spare)
        last = state.last_step(state.segments.versions(ticket))
        state.groups[ticket].last_step = min(state.groups[ticket].last_step, last)
        state.media.hold(ticket, state.media.media_of(spare))
        state.media.release(spare)


def use_logs(state: QueueState, tickets: Iterable[int]) -> None:
    """Use up the logs of ``tickets``, whose rows are accepted."""
    for ticket in tickets:
        if ticket in state.segments.logs:
            _release_shards(state, state.segments.use(ticket))


def lose_log(state: QueueState, holder: int, reason: str) -> None:
    """Drop a holder's log: another attempt replaces it, or no attempt may continue it."""
    if holder not in state.segments.logs:
        return
    log = state.segments.lose(holder, reason)
    _release_shards(state, log)
    state.events.add("unappended", [log.ticket], reason=reason)
    if holder < 0:
        state.media.release(holder)
    elif holder in state.tickets.reissued:
        state.groups[holder].last_step = NO_STEP


def lose_rolled_back(state: QueueState) -> None:
    """Drop logs with tokens of rolled-back weights, after a change of the lineage."""
    for holder, log in list(state.segments.logs.items()):
        if not state.lineage.origin(tuple(log.versions))[0]:
            lose_log(state, holder, "rolled_back")


def lose_stale(state: QueueState) -> None:
    """Drop spares that are too old for all steps to come, and all spares after the last step."""
    step = state.progress.furthest
    for spare in state.segments.spares:
        if step >= state.plan.steps:
            lose_log(state, spare, "unwanted")
        elif state.last_step(state.segments.versions(spare)) < step:
            lose_log(state, spare, "stale_version")


def _release_shards(state: QueueState, log: Log) -> None:
    for number in log.shards:
        state.shards.drop(number, 1, 1)
    state.woken.add(ADMISSION)
