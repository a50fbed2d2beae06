"""Fates of prompt groups, one for each put, from the journal."""

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


def read_fates(run: RunDir) -> Fates:
    """Fates of all prompt groups of ``run``, also of a live run. JournalError: the journal is
    damaged."""
    state, fates = QueueState(Plan.from_config(load_resolved(run.root))), Fates()
    shards: dict[int, str] = {}
    """Shard of each ticket's accepted rows."""
    for events in JournalCopy(run).replay(state):
        for event in events:
            if event.what not in _STATES:
                continue
            # There is one event for each row, and all rows of a ticket share its fate.
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
