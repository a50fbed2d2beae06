"""A queue in memory whose rows are audited after every request.

Nothing here waits or uses a socket. Every request is sent twice, as after a lost reply.
"""

from __future__ import annotations

import itertools
from typing import Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.gathering import covered_steps, journal_files, plan_files
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.row_ids import row_ids
from tests.helpers.queue_in_memory import InMemory, contents

GROUPS = {role: role for role in ("rollout", "actor", "actor_fwd", "reference")} | {
    "advantages": "hub"
}
"""The group of each role."""
BYTES = 100
"""Bytes of a prompt group in any shard."""


class GoneError(Exception):
    """Claimed rows cannot be read, because only the memory of an ended process had them."""


class CheckedQueue:
    """The queue of a run, its shards, and the expected state of each row.

    ``budget``: tokens of a claim. ``minis``: mini-batches of a step. ``save_every``: steps between
    checkpoints. ``slow_disk``: rows are put before they are on disk. ``settles``: before the actor
    trains, it asks whether its rows are on disk.
    """

    def __init__(
        self,
        plan: Plan,
        budget: int,
        minis: int = 1,
        save_every: int = 1,
        slow_disk: bool = False,
        settles: bool = True,
    ) -> None:
        self.plan, self.budget, self.minis, self.save_every = plan, budget, minis, save_every
        self.slow_disk, self.settles = slow_disk, settles
        self.unsaved: dict[str, list[str]] = {role: [] for role in GROUPS}
        self.gone: set[str] = set()
        self.service = InMemory(plan)
        self.keys = itertools.count()
        self.names = itertools.count()
        self.shapes = itertools.count()
        self.drawn = itertools.count()
        self.declared: dict[int, bytes] = {}
        """By ticket: the number of rows of each episode in the newest put."""
        self.incarnations = dict.fromkeys(GROUPS, 1)
        self.shards: dict[str, dict[int, dict[str, Any]]] = {}
        self.status: dict[str, str] = {}
        self.older = 0
        self.lost_steps = 0
        self.begun: set[int] = set()
        self.durable: dict[int, dict[int, int]] = {}
        """By ticket: the tokens of each episode after the newest append."""
        for role in GROUPS:
            self.reset_memory(role)

    def reset_memory(self, role: str) -> None:
        """Give ``role`` the memory of a new process."""
        setattr(self, role, None)

    def kill(self, role: str, noticed: bool) -> None:
        """End a process. ``noticed``: the supervisor reports it before the next process registers."""
        if noticed:
            self.ask_as(
                "supervisor", 1, "down", group=GROUPS[role], incarnation=self.incarnations[role]
            )
        self.incarnations[role] += 1
        self.gone.update(self.unsaved[role])
        self.unsaved[role] = []
        self.reset_memory(role)

    def ask(self, role: str, op: str, /, **args: Any) -> Any:
        return self.ask_as(GROUPS[role], self.incarnations[role], op, **args)

    def ask_as(self, group: str, incarnation: int, op: str, /, **args: Any) -> Any:
        key = f"k{next(self.keys)}"
        first = self.service.ask(group, incarnation, key, op, **args)
        if first is not None and op not in ("next_version", "note", "settled"):
            before = contents(self.service.replayed()) if len(self.service.journal) < 40 else None
            if next(self.keys) % 5 == 0:
                self.service.restart()
            second = self.service.ask(group, incarnation, key, op, **args)
            assert second == first, (op, first, second)
            assert before is None or contents(self.service.state) == before, op
        self.audit()
        return first

    def audit(self) -> None:
        """Check that every accepted row is either waiting, trained or dropped."""
        for event in self.service.state.events.take():
            if event.what == "accepted":
                assert self.status.get(event.id) in (None, "dropped"), event
            elif event.what == "trained":
                assert self.status[event.id] == "accepted", event
            elif event.what == "returned":
                for name in self.row_names(event.id):
                    assert self.status[name] == "trained", event
                    self.status[name] = "accepted"
            if event.what in ("accepted", "trained", "dropped"):
                self.status |= dict.fromkeys(self.row_names(event.id), event.what)
            if event.what == "dropped":
                assert event.reason, event
            assert event.what != "old_logprobs" or Version.parse(event.version), event
        logs = self.service.state.segments
        assert logs.appended == logs.used + logs.held + logs.lost.total(), (
            "every token must be counted exactly once"
        )
        for lease in self.service.state.leases.values():
            assigned = list[int]()
            for rank in lease.assignment:
                for batch in rank:
                    assigned += batch
            rows = sum(len(row_ids(ticket, self.declared[ticket])) for ticket in lease.tickets)
            assert sorted(assigned) == (list(range(rows)) if lease.task == "actor" else []), (
                "each row must be assigned to one rank"
            )

    def row_names(self, name: str) -> list[str]:
        """Ids of rows: the row ``name``, or rows of prompt group ``name`` that are not dropped."""
        rows = [row for row in self.status if row.startswith(f"{name}.")]
        remaining = [row for row in rows if self.status[row] != "dropped"]
        return remaining or ([name] if "." in name else [])

    def rows(self, claim: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Rows of a claim, merged from its shards as `read_rows` merges them. A claim's shards
        exist as long as its lease. GoneError: a shard was lost."""
        if not self.gone.isdisjoint(shard["name"] for shard in claim["shards"]):
            raise GoneError
        merged: dict[int, dict[str, Any]] = {ticket: {} for ticket in claim["tickets"]}
        for shard in claim["shards"]:
            for ticket in shard["tickets"]:
                merged[ticket].update(self.shards[shard["name"]][ticket])
        assert [row["episodes"] for row in merged.values()] == claim["episodes"]
        return merged

    def read(self, role: str, claim: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """`rows`. If a shard was lost, the lease is released and GoneError raised."""
        try:
            return self.rows(claim)
        except GoneError:
            self.ask(role, "release", lease=claim["lease"])
            raise

    def put(
        self,
        role: str,
        rows: dict[int, dict[str, Any]],
        fields: tuple[str, ...],
        lease: int = 0,
    ) -> dict[int, str]:
        """Put rows, and return the reason of each refused ticket."""
        name = f"s{next(self.names)}"
        self.shards[name] = rows
        summary = [
            {
                "ticket": ticket,
                "episodes": row["episodes"],
                "lengths": pack_lengths(row.get("lengths", [])),
                "versions": row.get("made_by", []),
            }
            for ticket, row in rows.items()
        ]
        put = {
            "shard": {"name": name, "bytes": BYTES * len(rows)},
            "rows": summary,
            "fields": list(fields),
        }
        reply = self.ask(role, "put", lease=lease, saved=not self.slow_disk, **put)
        if self.slow_disk:
            self.unsaved[role].append(name)
        if not lease:
            self.declared |= {
                ticket: row["episodes"]
                for ticket, row in rows.items()
                if ticket not in reply["refused"]
            }
        self.remove_garbage()
        return reply["refused"]

    def remove_garbage(self) -> None:
        """Remove shards that the queue does not need."""
        for garbage in self.service.state.shards.garbage:
            self.shards.pop(garbage, None)
        self.service.state.shards.garbage.clear()

    def gather(self) -> None:
        """Gather rows of trained steps into files, as the hub does while other roles work."""
        steps = covered_steps(self.service.state)
        work = plan_files(self.service.state, steps, 1, next(self.names))
        for file in work:
            rows = self.shards[file.name] = {}
            for ticket, rows_in_shards in file.parts.items():
                rows[ticket] = {}
                for number, _ in rows_in_shards:
                    rows[ticket] |= self.shards[file.shards[number]][ticket]
        sizes_bytes = [(file, BYTES * len(file.parts)) for file in work]
        journal_files(self.service, steps.stop, sizes_bytes)
        self.remove_garbage()

    def save(self, role: str) -> bool:
        """Report the unsaved shards of ``role`` as saved. False if it has none."""
        names, self.unsaved[role] = self.unsaved[role], []
        if names:
            self.ask(role, "saved", names=names)
            self.remove_garbage()
        return bool(names)

    def alive(self, version: Version) -> bool:
        return version in self.service.state.lineage
