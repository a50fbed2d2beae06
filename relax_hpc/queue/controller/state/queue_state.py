"""The controller's memory: a deterministic state machine over journal records.

Every change goes through `apply(record)`, in a live controller and in a replay alike. It calls the
applier that is registered for the record's `op` (`@applies`, in the file of its part). Functions in
`controller.planning` decide what may be done next; they only read the state. Bookkeeping is by
prompt group, whose number is its ticket. Symbols: t = step of a ticket, S = max_staleness, V =
version that an engine serves: a ticket is admitted only if V.number >= t - S (and V is not rolled
back).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from relax_hpc.queue.controller.registry import APPLIERS
from relax_hpc.queue.controller.state.device_turns import DeviceTurns
from relax_hpc.queue.controller.state.events import Events
from relax_hpc.queue.controller.state.leases import Leases
from relax_hpc.queue.controller.state.lineage import Lineage
from relax_hpc.queue.controller.state.media_holders import MediaHolders
from relax_hpc.queue.controller.state.members import Members
from relax_hpc.queue.controller.state.operations import Operations
from relax_hpc.queue.controller.state.progress import Progress, TrainingOrder
from relax_hpc.queue.controller.state.prompt_groups import PromptGroups
from relax_hpc.queue.controller.state.reply_cache import ReplyCache
from relax_hpc.queue.controller.state.segments import Segments
from relax_hpc.queue.controller.state.shards import Shards
from relax_hpc.queue.controller.state.task_queues import DONE, HELD, TaskQueues
from relax_hpc.queue.controller.state.tickets import Tickets
from relax_hpc.queue.controller.state.weights import Weights
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import NO_STEP, FieldBits


@dataclass(slots=True)
class Counts:
    """Counts since the run began."""

    accepted: int = 0
    """Rows that were accepted. A row that is accepted again counts again."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that were dropped, by reason."""
    noted: Counter[str] = field(default_factory=Counter)
    """Faults that concern no ticket, counted by `<what>/<reason>`."""

    def dump(self) -> Any:
        return self.accepted, dict(self.dropped), dict(self.noted)

    def load(self, values: Any) -> None:
        self.accepted, dropped, noted = values
        self.dropped, self.noted = Counter(dropped), Counter(noted)


Record = dict[str, Any]
_SAVED = (
    *("members", "lineage", "weights", "progress", "tickets", "order", "leases", "shards"),
    *("tasks", "segments", "media", "counts", "device_turns", "admissions", "puts"),
    "operations",
)
"""Parts that a snapshot contains, each by its `dump` and `load`; in addition to `groups` and
`bits`."""


class QueueState:
    """All parts of the state. Only appliers of records change them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        fields: list[str] = []
        for task in plan.tasks.values():
            fields += (*task.needs, *task.gives)
        self.bits = FieldBits(fields)
        self.generated = self.bits.mask(("token_ids",))
        self.scored = self.bits.mask(("old_logprob_version",))
        self.members = Members()
        self.lineage = Lineage()
        self.weights = Weights(self.lineage)
        self.progress = Progress(plan)
        self.groups = PromptGroups()
        self.tickets = Tickets()
        self.order = TrainingOrder()
        self.tasks = TaskQueues(plan, self.bits)
        self.leases = Leases()
        self.shards = Shards()
        self.segments = Segments()
        self.media = MediaHolders()
        self.counts = Counts()
        self.device_turns = DeviceTurns()
        self.admissions, self.puts = ReplyCache(), ReplyCache()
        self.operations = Operations()
        self.events = Events(plan)
        self.woken: set[str] = set()
        """Topics of waiting requests that may have an answer now. The service empties it."""

    def apply(self, record: Record) -> None:
        """Apply one journal record. This is deterministic; records are checked before they are
        journaled."""
        arguments = dict(record)
        if "owner" in arguments:
            # Records from the journal have a list here.
            arguments["owner"] = tuple(arguments["owner"])
        APPLIERS[arguments.pop("op")](self, **arguments)

    # -- values that depend on several parts -------------------------------------------------------

    def tickets_by_shard(self, tickets: Iterable[int], bits: int) -> dict[int, list[int]]:
        """Tickets by the number of each shard that has any of these fields of them."""
        groups, mask = self.groups, self.bits.mask
        by_shard: dict[int, list[int]] = {}
        for ticket in tickets:
            for number, fields in groups[ticket].parts:
                if mask(fields) & bits:
                    in_shard = by_shard.setdefault(number, [])
                    if not in_shard or in_shard[-1] != ticket:
                        in_shard.append(ticket)
        return by_shard

    def add_row_events(
        self, what: str, tickets: Sequence[int], version: str = "", step: int = NO_STEP
    ) -> None:
        """Add the same event for all rows of ``tickets``."""
        for episodes, alike in groupby(tickets, lambda ticket: self.groups[ticket].episodes):
            self.events.add_rows(what, episodes, list(alike), version, step=step)

    def tickets_of(self, step: int) -> Sequence[int]:
        """Tickets that ``step`` trains, if they are already decided; ascending if steps have no
        sets."""
        size = self.plan.prompts_per_step
        first, end = step * size, (step + 1) * size
        return self.order.between(first, end) if self.tasks.in_sets else range(first, end)

    def is_trained(self, ticket: int) -> bool:
        """Whether all trainers have trained on ``ticket``."""
        return all(self.tasks[task].statuses[ticket] == DONE for task in self.plan.trainers)

    def is_trained_by_any(self, ticket: int) -> bool:
        return any(self.tasks[task].statuses[ticket] == DONE for task in self.plan.trainers)

    def is_taken(self, ticket: int, but: str) -> bool:
        """Whether a trainer other than ``but`` holds ``ticket`` or has trained on it."""
        return any(
            self.tasks[task].statuses[ticket] >= HELD for task in self.plan.trainers if task != but
        )

    def step_of(self, ticket: int) -> int:
        """The step that trains ``ticket``; while it is undecided, the step for which the ticket is
        admitted."""
        group = self.groups.get(ticket)
        if group is None or group.position == NO_STEP:
            return self.plan.step_of(ticket)
        return self.plan.step_of(group.position)

    def last_step(self, codes: Iterable[int]) -> int:
        """The last step that may train tokens of these encoded versions; NO_STEP if ``codes`` is
        empty."""
        oldest = self.lineage.origin(tuple(codes))[1]
        return oldest + self.plan.max_staleness if oldest >= 0 else NO_STEP

    # -- snapshots ---------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """The whole state for a snapshot, without events that were not taken yet."""
        parts = {name: getattr(self, name).dump() for name in _SAVED}
        return {"fields": self.bits.names, "groups": self.groups.dump(), **parts}

    @classmethod
    def load(cls, plan: Plan, values: dict[str, Any]) -> QueueState:
        """The state of a dump. LookupError, TypeError or ValueError: ``values`` are no dump."""
        state = cls(plan)
        state.bits = FieldBits(values["fields"])
        state.groups.load(values["groups"], state.bits)
        for name in _SAVED:
            getattr(state, name).load(values[name])
        state._count_derived()
        return state

    def _count_derived(self) -> None:
        """Compute values that are not in a dump because they follow from it: the lists of tickets,
        and the numbers of users of each shard."""
        shards = self.shards.by_number
        trained = {ticket for ticket in self.groups if self.is_trained(ticket)}
        for ticket, group in self.groups.items():
            for number, _ in group.parts:
                shards[number].needed += 1
                shards[number].untrained += ticket not in trained
        for number, count in self.segments.shards().items():
            shards[number].needed += count
            shards[number].untrained += count
        for lease in self.leases.values():
            for number in lease.shards:
                shards[number].leases += 1
        self.tickets.generating.add(
            ticket for ticket, group in self.groups.items() if not group.parts
        )
        untrained = self.groups.keys() - trained - set(self.tickets.generating)
        self.tickets.wait(untrained, self.groups.rows_of(untrained))
        for number, shard in shards.items():
            self.shards.restore(number, shard)
