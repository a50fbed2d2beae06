"""Events, each a line of events.jsonl, kept by the batch because a step has thousands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from json.encoder import encode_basestring_ascii as quoted

from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import NO_STEP, Event
from relax_hpc.queue.row_ids import row_id_suffixes, row_ids

_ID = b"\0"
"""Byte that stands for a ticket in a template; JSON text never holds it."""


@dataclass(slots=True)
class EventBatch:
    """The same event of several prompt groups, or, where they have `episodes`, of each row of
    them."""

    what: str
    tickets: Sequence[int]
    episodes: bytes
    """Rows of each episode, the same in all tickets."""
    prompts_per_step: int
    version: str = ""
    reason: str = ""
    step: int = NO_STEP
    """Step of all events; NO_STEP: each is of the step that its ticket is admitted for."""

    def step_of(self, ticket: int) -> int:
        return ticket // self.prompts_per_step if self.step == NO_STEP else self.step

    def events(self) -> Iterator[Event]:
        for ticket in self.tickets:
            names = row_ids(ticket, self.episodes) or [f"{ticket:09d}"]
            step = self.step_of(ticket)
            yield from (Event(name, self.what, step, self.version, self.reason) for name in names)

    def lines(self) -> Iterator[bytes]:
        """Events as lines of JSON, several lines a piece."""
        about = (self.episodes, self.what, self.version, self.reason)
        step, template = -1, b""
        for ticket in self.tickets:
            if self.step_of(ticket) != step:
                step = self.step_of(ticket)
                template = _template(step, *about)
            yield template.replace(_ID, b"%09d" % ticket)


def expand(batches: Iterable[Event | EventBatch]) -> Iterator[Event]:
    """Single events of ``batches``, one a line."""
    for one in batches:
        if isinstance(one, Event):
            yield one
        else:
            yield from one.events()


def lines(batches: Iterable[Event | EventBatch]) -> bytes:
    """Lines of JSON for the events that `expand` gives."""
    return b"".join(
        chain.from_iterable(
            [_line(one)] if isinstance(one, Event) else one.lines() for one in batches
        )
    )


def _line(event: Event) -> bytes:
    return _about(quoted(event.id), event.what, event.step, event.version, event.reason).encode()


@lru_cache(maxsize=128)
def _template(step: int, episodes: bytes, what: str, version: str, reason: str) -> bytes:
    names = [f'"\0{end}"' for end in row_id_suffixes(episodes)] or ['"\0"']
    return "".join(_about(name, what, step, version, reason) for name in names).encode()


def _about(name: str, what: str, step: int, version: str, reason: str) -> str:
    return (
        f'{{"id": {name}, "what": {quoted(what)}, "step": {step}, '
        f'"version": {quoted(version)}, "reason": {quoted(reason)}}}\n'
    )


class Events:
    """Events that nobody has taken yet; no part of what a state is."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.batches: list[Event | EventBatch] = []

    def tell(self, what: str, tickets: Sequence[int], version: str = "", reason: str = "") -> None:
        """Add one event of each of these prompt groups."""
        if tickets:
            self.batches.append(
                EventBatch(what, tickets, b"", self.plan.prompts_per_step, version, reason)
            )

    def tell_rows(
        self,
        what: str,
        episodes: bytes,
        tickets: Sequence[int],
        version: str = "",
        reason: str = "",
        step: int = NO_STEP,
    ) -> None:
        """One event of each row of them, whose episodes have so many; of each prompt group, if they
        have none."""
        about = self.plan.prompts_per_step, version, reason, step
        self.batches.append(EventBatch(what, tickets, episodes, *about))

    def tell_of(self, name: str, what: str, step: int, reason: str) -> None:
        """Add one event of something else than a prompt group."""
        self.batches.append(Event(name, what, step, reason=reason))

    def take(self) -> Iterator[Event]:
        """Events since the last call, one a row."""
        batches, self.batches = self.batches, []
        return expand(batches)

    def take_lines(self) -> bytes:
        """Events since the last call, as lines of JSON."""
        batches, self.batches = self.batches, []
        return lines(batches)
