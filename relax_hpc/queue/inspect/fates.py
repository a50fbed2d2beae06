"""Fates of prompt groups, put by put, as the journal tells them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import load_resolved
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.inspect.audit import JournalCopy
from relax_hpc.queue.plan import Plan


class Fate(NamedTuple):
    """`state`: accepted, trained or dropped; `about`: the version that was trained on it, or why it
    was dropped.

    >>> str(Fate("dropped", "rolled_back"))
    'dropped rolled_back'
    """

    state: str
    about: str = ""

    @property
    def step(self) -> int | None:
        """The step that it was trained in, which above staleness 0 may be another than its
        ticket's."""
        return Version.parse(self.about).number if self.state == "trained" else None

    def __str__(self) -> str:
        return f"{self.state} {self.about}".strip()


Fates = dict[tuple[int, str], Fate]
"""Fates by ticket and the shard that its rows were put in: a ticket that was drawn again has
several. A put that nobody accepted has none."""


def read_fates(run: RunDir) -> Fates:
    """Fates of all prompt groups of ``run``, also while it goes on. JournalError if the journal is
    damaged."""
    state, fates = QueueState(Plan.from_config(load_resolved(run.root))), Fates()
    shards: dict[int, str] = {}
    """Shard of each ticket's accepted rows."""
    for events in JournalCopy(run).replay(state):
        for event in events:
            if event.what not in _STATES:
                continue
            # One event a row, and those of a ticket share its fate.
            ticket = int(event.id.partition(".")[0])
            if event.what == "accepted":
                shards[ticket] = _shard_of(state, ticket)
            shard = shards.pop(ticket, None) if event.what == "dropped" else shards.get(ticket)
            if shard:
                fates[ticket, shard] = _fate(event.what, event.version, event.reason)
    return fates


_STATES = {
    "accepted": "accepted",
    "returned": "accepted",
    "trained": "trained",
    "dropped": "dropped",
}
"""State by the name of an event; a ticket is returned when the weights that it was trained into are
rolled back."""


@lru_cache(maxsize=4096)
def _fate(what: str, version: str, reason: str) -> Fate:
    """Fate as one object for all that share it."""
    return Fate(_STATES[what], {"trained": version, "dropped": reason}.get(what, ""))


def _shard_of(state: QueueState, ticket: int) -> str:
    """Name of the shard in which the accepted rows of ``ticket`` lie."""
    number = next(number for number, fields in state.groups[ticket].parts if "token_ids" in fields)
    return state.shards[number].descriptor["name"]
