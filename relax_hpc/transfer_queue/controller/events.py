"""What the controller tells: events, each a line of events.jsonl, kept by the batch because a step has thousands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from json.encoder import encode_basestring_ascii as quoted

from relax_hpc.transfer_queue.records import NO_STEP, Event
from relax_hpc.transfer_queue.row_schema import sample_id

_ID = b"\0"
"""Stands for a ticket in a template; JSON text never holds it."""


@dataclass(slots=True)
class Told:
    """The same event of several prompt groups, or, where `samples` is not 0, of each of so many samples of them."""

    what: str
    tickets: Sequence[int]
    samples: int
    prompts_per_step: int
    version: str = ""
    reason: str = ""
    step: int = NO_STEP
    """Of all of them; NO_STEP: each is of the step that its ticket is admitted for."""

    def step_of(self, ticket: int) -> int:
        return ticket // self.prompts_per_step if self.step == NO_STEP else self.step

    def events(self) -> Iterator[Event]:
        for ticket in self.tickets:
            names = [sample_id(ticket, k) for k in range(self.samples)] or [f"{ticket:09d}"]
            step = self.step_of(ticket)
            yield from (Event(name, self.what, step, self.version, self.reason) for name in names)

    def lines(self) -> Iterator[bytes]:
        """As JSON, several lines a piece."""
        about = (self.samples, self.what, self.version, self.reason)
        step, template = -1, b""
        for ticket in self.tickets:
            if self.step_of(ticket) != step:
                step = self.step_of(ticket)
                template = _template(step, *about)
            yield template.replace(_ID, b"%09d" % ticket)


def expand(told: Iterable[Event | Told]) -> Iterator[Event]:
    """One event a line."""
    for one in told:
        if isinstance(one, Event):
            yield one
        else:
            yield from one.events()


def lines(told: Iterable[Event | Told]) -> bytes:
    """What `expand` gives, as lines of JSON."""
    return b"".join(chain.from_iterable([_line(one)] if isinstance(one, Event) else one.lines() for one in told))


def _line(event: Event) -> bytes:
    return _about(quoted(event.id), event.what, event.step, event.version, event.reason).encode()


@lru_cache(maxsize=128)
def _template(step: int, samples: int, what: str, version: str, reason: str) -> bytes:
    names = [f'"\0.{k:02d}"' for k in range(samples)] or ['"\0"']
    return "".join(_about(name, what, step, version, reason) for name in names).encode()


def _about(name: str, what: str, step: int, version: str, reason: str) -> str:
    return (
        f'{{"id": {name}, "what": {quoted(what)}, "step": {step}, '
        f'"version": {quoted(version)}, "reason": {quoted(reason)}}}\n'
    )
