"""Fates of prompt groups, one for each put, from the journal."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any, NamedTuple

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import load_resolved
from relax_hpc.queue.controller.state.events import expand
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.inspect.journal_copy import (
    MALFORMED,
    DifferentJournalError,
    JournalCopy,
)
from relax_hpc.queue.inspect.journal_summary import read_summary
from relax_hpc.queue.inspect.row_lives import pack_integers, unpack_integers
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import Event


class Fate(NamedTuple):
    """`state`: accepted, trained or dropped. `detail`: the version that was trained on it, or the
    reason of the drop.

    >>> str(Fate("dropped", "rolled_back"))
    'dropped rolled_back'
    """

    state: str
    detail: str = ""

    @property
    def step(self) -> int | None:
        """The step that trained it. Above staleness 0 it may differ from the step of its ticket."""
        return Version.parse(self.detail).number if self.state == "trained" else None

    def __str__(self) -> str:
        return f"{self.state} {self.detail}".strip()


Fates = dict[tuple[int, str], Fate]
"""Fates by ticket and the shard of its rows. A ticket that was generated again has several. A
refused put has none."""


def read_fates(run: RunDir, with_summary: bool = True) -> Fates:
    """Fates of all prompt groups of ``run``, also of a live run. JournalError: the journal is
    damaged.

    ``with_summary``: begin with the summary of the journal, if it matches. The result is the same
    without it.
    """
    plan = Plan.from_config(load_resolved(run.root))
    summary = read_summary(run, plan) if with_summary else None
    if summary:
        try:
            record = FateRecord()
            record.load(summary.fates)
            state = QueueState.load(plan, summary.state)
            return _follow(JournalCopy(run, summary.prefix), state, record)
        except (DifferentJournalError, *MALFORMED, zlib.error):
            # The journal itself decides what is wrong.
            pass
    return _follow(JournalCopy(run), QueueState(plan), FateRecord())


def _follow(copy: JournalCopy, state: QueueState, record: FateRecord) -> Fates:
    for batches in copy.replay(state):
        for event in expand(batches):
            record.take(state, event)
    return record.fates


class FateRecord:
    """Fates of the prompt groups whose events were taken."""

    def __init__(self) -> None:
        self.fates: Fates = {}
        self._shards: dict[int, str] = {}
        """Shard of each ticket's accepted rows."""

    def take(self, state: QueueState, event: Event) -> None:
        """Follow an event of the record that was applied to ``state`` last."""
        if event.what not in _STATES:
            return
        # There is one event for each row, and all rows of a ticket share its fate.
        ticket, shards = int(event.id.partition(".")[0]), self._shards
        if event.what == "accepted":
            shards[ticket] = _shard_of(state, ticket)
        shard = shards.pop(ticket, None) if event.what == "dropped" else shards.get(ticket)
        if shard:
            self.fates[ticket, shard] = _fate(event.what, event.version, event.reason)

    def dump(self) -> Any:
        """All fates, for a summary."""
        names = {shard: number for number, shard in enumerate({shard for _, shard in self.fates})}
        fates = {fate: number for number, fate in enumerate(set(self.fates.values()))}
        return {
            "names": list(names),
            "fates": [list(fate) for fate in fates],
            "tickets": pack_integers([ticket for ticket, _ in self.fates]),
            "shards": pack_integers([names[shard] for _, shard in self.fates]),
            "states": pack_integers([fates[fate] for fate in self.fates.values()]),
            "present": pack_integers(list(self._shards)),
            "present_shards": pack_integers([names[shard] for shard in self._shards.values()]),
        }

    def load(self, values: Any) -> None:
        """Take the fates of a dump. LookupError, TypeError, ValueError, zlib.error: it is none."""
        names, fates = values["names"], [Fate(*fate) for fate in values["fates"]]
        shards = map(names.__getitem__, unpack_integers(values["shards"]))
        states = map(fates.__getitem__, unpack_integers(values["states"]))
        keys = zip(unpack_integers(values["tickets"]), shards, strict=True)
        self.fates = dict(zip(keys, states, strict=True))
        present = map(names.__getitem__, unpack_integers(values["present_shards"]))
        self._shards = dict(zip(unpack_integers(values["present"]), present, strict=True))


_STATES = {
    "accepted": "accepted",
    "returned": "accepted",
    "trained": "trained",
    "dropped": "dropped",
}
"""State by the name of an event. A ticket is returned when the weights that were trained on it are
rolled back."""


@lru_cache(maxsize=4096)
def _fate(event: str, version: str, reason: str) -> Fate:
    """One object for all equal fates."""
    return Fate(_STATES[event], {"trained": version, "dropped": reason}.get(event, ""))


def _shard_of(state: QueueState, ticket: int) -> str:
    """Name of the shard that has the accepted rows of ``ticket``."""
    number = next(number for number, fields in state.groups[ticket].parts if "token_ids" in fields)
    return state.shards[number].descriptor["name"]
