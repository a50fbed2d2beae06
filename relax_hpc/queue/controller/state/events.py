"""Events, the lines of events.jsonl. They are kept in batches, because a step has thousands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted

from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import NO_STEP, Event
from relax_hpc.queue.row_ids import row_id_suffixes, row_ids

_ID = b"\0"
"""Byte that stands for a ticket in a template. JSON text never contains it."""


@dataclass(slots=True)
class EventBatch:
    """The same event of several prompt groups or, with `episodes`, of each of their rows."""

    what: str
    tickets: Sequence[int]
    episodes: bytes
    """Rows of each episode, the same in all tickets."""
    prompts_per_step: int
    version: str = ""
    reason: str = ""
    step: int = NO_STEP
    """Step of all events; NO_STEP: each has the step for which its ticket is admitted."""

    def step_of(self, ticket: int) -> int:
        return ticket // self.prompts_per_step if self.step == NO_STEP else self.step

    def events(self) -> Iterator[Event]:
        for ticket in self.tickets:
            names = row_ids(ticket, self.episodes) or [f"{ticket:09d}"]
            step = self.step_of(ticket)
            yield from (Event(name, self.what, step, self.version, self.reason) for name in names)

    def lines(self) -> Iterator[bytes]:
        """Events as lines of JSON, several lines at a time."""
        step, template = -1, b""
        for ticket in self.tickets:
            if self.step_of(ticket) != step:
                step = self.step_of(ticket)
                template = _template(step, self.episodes, self.what, self.version, self.reason)
            yield template.replace(_ID, b"%09d" % ticket)


def expand(batches: Iterable[Event | EventBatch]) -> Iterator[Event]:
    """Single events of ``batches``."""
    for batch in batches:
        if isinstance(batch, Event):
            yield batch
        else:
            yield from batch.events()


def to_lines(batches: Iterable[Event | EventBatch]) -> bytes:
    """Lines of JSON for the events of `expand`."""
    pieces: list[bytes] = []
    for batch in batches:
        if isinstance(batch, Event):
            pieces.append(to_line(batch))
        else:
            pieces += batch.lines()
    return b"".join(pieces)


def to_line(event: Event) -> bytes:
    """An event as a line of JSON."""
    text = _json_line(quoted(event.id), event.what, event.step, event.version, event.reason)
    return text.encode()


@lru_cache(maxsize=128)
def _template(step: int, episodes: bytes, what: str, version: str, reason: str) -> bytes:
    """Lines of the rows of a prompt group, with `_ID` in place of the ticket."""
    names = [f'"\0{end}"' for end in row_id_suffixes(episodes)] or ['"\0"']
    return "".join(_json_line(name, what, step, version, reason) for name in names).encode()


def _json_line(name: str, what: str, step: int, version: str, reason: str) -> str:
    return (
        f'{{"id": {name}, "what": {quoted(what)}, "step": {step}, '
        f'"version": {quoted(version)}, "reason": {quoted(reason)}}}\n'
    )


class Events:
    """Events that were not taken yet. They do not belong to the state."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.batches: list[Event | EventBatch] = []

    def add(self, what: str, tickets: Sequence[int], version: str = "", reason: str = "") -> None:
        """Add one event of each of these prompt groups."""
        if tickets:
            self.batches.append(
                EventBatch(what, tickets, b"", self.plan.prompts_per_step, version, reason)
            )

    def add_rows(
        self,
        what: str,
        episodes: bytes,
        tickets: Sequence[int],
        version: str = "",
        reason: str = "",
        step: int = NO_STEP,
    ) -> None:
        """Add one event of each row of these prompt groups, whose episodes have this many rows; if
        they have none, one of each prompt group."""
        step_size = self.plan.prompts_per_step
        self.batches.append(EventBatch(what, tickets, episodes, step_size, version, reason, step))

    def add_named(self, name: str, what: str, step: int, reason: str) -> None:
        """Add one event that concerns no prompt group."""
        self.batches.append(Event(name, what, step, reason=reason))

    def take(self) -> Iterator[Event]:
        """Events since the last call."""
        return expand(self.take_batches())

    def take_batches(self) -> list[Event | EventBatch]:
        """Events since the last call, not expanded."""
        batches, self.batches = self.batches, []
        return batches

    def take_lines(self) -> bytes:
        """Events since the last call, as lines of JSON."""
        return to_lines(self.take_batches())
