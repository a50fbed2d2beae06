"""Logs of segments: what was made of attempts at tickets before their rows are accepted, so that
none of it is lost.

A log grows, segment by segment, while engines are at the attempt. Whoever has the ticket next goes
on after the last ones, and rows that are accepted use the log up. A spare is a whole attempt that
no ticket had a use for: its log waits for one that can be made of it. Every token that was ever
appended is used, held, or lost with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.topics import ADMISSION
from relax_hpc.queue.records import NO_STEP, Owner, Shard

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


Segment = Sequence[int]
"""Tokens that came of a row since its last segment: episode, row, tokens that the row had before,
tokens that it gets, and 1 if the episode ends with it. Tokens of prompts do not count."""
Growth = tuple[int, int, Sequence[Segment], Sequence[int]]
"""Growth of a log: its ticket and attempt, segments, and `Version.encode` of what sampled them."""


@dataclass(slots=True)
class Log:
    """All segments of one attempt."""

    ticket: int
    """Ticket by which its segments are named. A spare may be given to another one."""
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
        """Whether they go on where it ends, or begin before with tokens that it has: the answer to
        who appended those was lost."""
        for episode, row, start, tokens, _ in segments:
            known, end = self.lengths.get((episode, row), 0), start + tokens
            if not start <= known <= end or (known < end and episode in self.ended):
                return False
        return True

    def grow(self, shard: int, growth: Growth) -> int:
        """Add what lies in ``shard``; how many tokens of it are new."""
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
    """All logs, and what became of their tokens."""

    logs: dict[int, Log] = field(default_factory=dict)
    """Logs by holder, the oldest first: the ticket that is made of it, or the negative number of a
    spare."""
    last_spare: int = 0
    appended: int = 0
    """Tokens that were ever appended, also those that were refused."""
    used: int = 0
    """Tokens in rows that were accepted."""
    lost: Counter[str] = field(default_factory=Counter)
    """Tokens that were lost, by reason."""

    @property
    def spares(self) -> list[int]:
        return [holder for holder in self.logs if holder < 0]

    @property
    def held(self) -> int:
        return sum(log.tokens for log in self.logs.values())

    def counts(self) -> dict[str, int]:
        """Tokens that were ever appended, by what became of them; those that were lost as
        `lost/<reason>`."""
        found = {"appended": self.appended, "used": self.used, "held": self.held}
        return found | {f"lost/{reason}": tokens for reason, tokens in sorted(self.lost.items())}

    def shards(self) -> Counter[int]:
        """Numbers of all shards, and the number of logs that lie in each."""
        return Counter(number for log in self.logs.values() for number in log.shards)

    def versions(self, holder: int) -> frozenset[int]:
        """Versions that sampled the holder's log; empty if there is none."""
        log = self.logs.get(holder)
        return log.versions if log else frozenset()

    def append(self, shard: int, growth: Growth, spare: bool) -> int:
        """Let a log grow by what lies in ``shard``; its holder."""
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
        """Use up a holder's log, whose rows are accepted."""
        log = self.logs.pop(holder)
        self.used += log.tokens
        return log

    def lose(self, holder: int, reason: str) -> Log:
        """Lose a log that nobody may go on with, or can."""
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
            known = {(episode, row): tokens for (episode, row), tokens in lengths}
            self.logs[holder] = Log(
                ticket, attempt, frozenset(versions), list(shards), known, set(ended)
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
        if growth[0] in refused:
            state.segments.refuse(growth, refused[growth[0]])
        elif (holder := state.segments.append(number, growth, spare)) < 0:
            state.media.hold(holder, state.media.of(growth[0]))
    state.events.tell("spared" if spare else "appended", [growth[0] for growth in taken])


@applies("drop_attempt")
def drop_attempt(
    state: QueueState, key: str, owner: Owner, ticket: int, spare: bool, reason: str
) -> None:
    state.puts.remember(key, owner, {})
    if spare:
        state.counts.dropped[reason] += len(state.plan.undeclared)
        state.events.tell("failed", [ticket], reason=reason)
    else:
        lose_log(state, ticket, reason)


@applies("bind")
def bind(state: QueueState, spares: Mapping[int, int]) -> None:
    """Bind tickets to the spares that they are made of from now on (ticket -> spare)."""
    for ticket, spare in spares.items():
        state.segments.logs[ticket] = state.segments.logs.pop(spare)
        last = state.last_step(state.segments.versions(ticket))
        state.groups[ticket].last = min(state.groups[ticket].last, last)
        state.media.hold(ticket, state.media.of(spare))
        state.media.release(spare)


def use_logs(state: QueueState, tickets: Iterable[int]) -> None:
    """Use up the logs of ``tickets``, whose rows are accepted."""
    for ticket in [ticket for ticket in tickets if ticket in state.segments.logs]:
        _leave_shards(state, state.segments.use(ticket))


def lose_log(state: QueueState, holder: int, reason: str) -> None:
    """Drop a holder's log: another attempt takes its place, or nobody may use it any more."""
    if holder not in state.segments.logs:
        return
    log = state.segments.lose(holder, reason)
    _leave_shards(state, log)
    state.events.tell("unappended", [log.ticket], reason=reason)
    if holder < 0:
        state.media.release(holder)
    elif holder in state.tickets.reissued:
        state.groups[holder].last = NO_STEP


def lose_rolled_back(state: QueueState) -> None:
    """Drop logs whose tokens were drawn with rolled-back weights, after the lineage changed."""
    for holder, log in list(state.segments.logs.items()):
        if not state.lineage.origin(tuple(log.versions))[0]:
            lose_log(state, holder, "rolled_back")


def lose_stale(state: QueueState) -> None:
    """Spares that no step which is still to be trained admits, or that come after the last one."""
    step = state.progress.furthest
    for spare in state.segments.spares:
        if step >= state.plan.steps:
            lose_log(state, spare, "unwanted")
        elif state.last_step(state.segments.versions(spare)) < step:
            lose_log(state, spare, "stale_version")


def _leave_shards(state: QueueState, log: Log) -> None:
    for number in log.shards:
        state.shards.drop(number, 1, 1)
    state.woken.add(ADMISSION)
