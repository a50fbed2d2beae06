"""The controller's memory: a deterministic state machine over journal records.

Every change goes through `apply(record)`, in a live controller and in a replay alike; planning methods only read.
Bookkeeping is by prompt group, whose number is its ticket. Symbols: t = step of a ticket, S = max_staleness,
V = version that an engine serves: a ticket is admitted only if V.number >= t - S (and V is not rolled back).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Any

from relax_hpc.transfer_queue import windows
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.records import DONE, Event, Lease, Owner, PromptGroup, Shard
from relax_hpc.transfer_queue.schema import sample_id
from relax_hpc.versions import Version

Record = dict[str, Any]
REMEMBERED = 256
REJECTED = ("rolled_back", "stale_version", "incomplete")
"""Why generated rows are dropped and their ticket is offered again."""


class QueueState:
    """See the module. Fields are read by the controller and by tests; only `apply` writes them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.full = (1 << plan.samples_per_group) - 1
        self.epochs: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.groups: dict[int, PromptGroup] = {}
        self.next_ticket = 0
        self.reissued: list[int] = []
        self.admissions: dict[str, list[int]] = {}
        self.puts: dict[str, dict[int, str]] = {}
        self.leases: dict[int, Lease] = {}
        self.lease_keys: dict[str, int] = {}
        self.next_lease = 1
        self.position: dict[str, int] = dict.fromkeys(plan.tasks, 0)
        self.returned: dict[str, list[tuple[int, ...]]] = {task: [] for task in plan.tasks}
        self.shards: dict[int, Shard] = {}
        self.next_shard = 1
        self.garbage: list[str] = []
        self.dropped: Counter[str] = Counter()
        self.noted: Counter[str] = Counter()
        self.lineage: list[tuple[int, int]] = []
        self.published: dict[Version, str] = {}
        self.newest: Version | None = None
        self.readers: dict[str, tuple[Owner, Version]] = {}
        self.checkpoints: list[dict[str, Any]] = []
        self.trained_steps = 0
        self.evaluated = -1
        self.events: list[Event] = []

    # -- reading -----------------------------------------------------------------------------------------------

    def in_lineage(self, version: Version) -> bool:
        """Whether ``version`` survives: its epoch trained, and no later epoch resumed below its number."""
        epochs = [epoch for epoch, _ in self.lineage]
        if version.epoch not in epochs:
            return False
        later = self.lineage[epochs.index(version.epoch) + 1 :]
        return all(version.number <= start for _, start in later)

    def over(self, owner: Owner) -> int:
        """0 while ``owner`` may speak for its group, else the lowest epoch that may."""
        group, epoch = owner
        lowest = max(self.epochs.get(group, 0), self.ended.get(group, 0) + 1)
        return lowest if epoch < lowest else 0

    def newer(self, after: Version) -> Version | None:
        """The newest published version that is in the lineage, if it is above ``after``."""
        newest = self.newest
        return newest if newest is not None and newest > after and self.in_lineage(newest) else None

    def finished(self) -> bool:
        """Every step is trained, the last weights are saved, and evaluated if evaluation is on."""
        evaluated = not self.plan.eval_every or self.evaluated >= self.plan.steps
        saved = any(point["step"] >= self.plan.steps for point in self.checkpoints)
        return self.trained_steps >= self.plan.steps and saved and evaluated

    def admissible(self, version: Version, count: int) -> list[int]:
        """Up to ``count`` tickets that an engine serving ``version`` may start, lowest first."""
        if not self.in_lineage(version):
            return []
        end = min(self.plan.steps, version.number + self.plan.max_staleness + 1) * self.plan.groups_per_step
        again = [ticket for ticket in heapq.nsmallest(count, self.reissued) if ticket < end]
        fresh = range(self.next_ticket, min(end, self.next_ticket + count - len(again)))
        return [*again, *fresh]

    def claimable(self, task: str, budget: int, boundary: int) -> tuple[int, ...]:
        """The next window of ``task``: ready tickets whose padded tokens fit ``budget`` (one group always fits).

        A window never crosses a multiple of ``boundary`` tickets. In order, it is known to be complete: the group
        behind it would not fit, or the boundary is reached.
        """
        for window in self.returned[task]:
            if all(self.ready(task, ticket) for ticket in window):
                return window
        cut = windows.in_order if self.plan.tasks[task].in_order else windows.as_ready
        return cut(self, task, budget, boundary)

    def ready(self, task: str, ticket: int) -> bool:
        """Whether ``task`` may take ``ticket``: all it needs is there, and it has neither claimed nor consumed it."""
        group = self.groups.get(ticket)
        if group is None or task in group.tasks:
            return False
        return all(group.present.get(name) == self.full for name in self.plan.tasks[task].needs)

    def refusal(self, owner: Owner, row: dict[str, Any], lease: int) -> str:
        """Why a put of one prompt group cannot be taken ('' if it can; 'duplicate' is harmless)."""
        ticket = row["ticket"]
        group = self.groups.get(ticket)
        if group is None:
            return "unknown_ticket"
        versions = [Version.decode(code) for code in row["versions"]]
        survive = all(self.in_lineage(version) for version in versions)
        oldest = self.plan.step_of(ticket) - self.plan.max_staleness
        if lease:
            held = self.leases.get(lease)
            if not held or held.owner != owner or ticket not in held.tickets:
                return "lease_lost"
            on_policy = self.plan.max_staleness > 0 or all(version.number >= oldest for version in versions)
            return ("" if on_policy else "stale_version") if survive else "rolled_back"
        if group.present:
            return "duplicate"
        if group.owner != owner:
            return "not_owner"
        if row["mask"] != self.full:
            return "incomplete"
        if not versions or not survive:
            return "rolled_back"
        return "" if min(version.number for version in versions) >= oldest else "stale_version"

    def retirable(self) -> list[Version]:
        """Published versions below the newest that no reader serves or may still be loading, oldest first."""
        served = [version for _, version in self.readers.values()]
        floor = min([*served, self.newest]) if self.newest else None
        return sorted(version for version in self.published if floor is not None and version < floor)

    def staleness(self, step: int) -> list[int]:
        """Of each prompt group of ``step``: the version trained minus the oldest version of its tokens."""
        size = self.plan.groups_per_step
        groups = (self.groups.get(ticket) for ticket in range(step * size, (step + 1) * size))
        return [step - min(Version.decode(code).number for code in group.versions) for group in groups if group]

    def depth(self) -> dict[str, int]:
        """Prompt groups by how far they are: in generation, waiting for training."""
        live = [group for group in self.groups.values() if group.tasks.get("actor") != DONE]
        generated = sum(group.present.get("token_ids") == self.full for group in live)
        return {"generating": len(live) - generated, "ready": generated, "reissued": len(self.reissued)}

    # -- changing ----------------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Carry out one journal record. Deterministic; records are checked before they are journaled."""
        getattr(self, "_on_" + record["op"])(**{key: value for key, value in record.items() if key != "op"})

    def _on_register(self, group: str, epoch: int) -> None:
        if epoch > self.epochs.get(group, 0):
            self.epochs[group] = epoch
            self._take_back(group, epoch)

    def _on_down(self, group: str, epoch: int) -> None:
        self.ended[group] = max(epoch, self.ended.get(group, 0))
        self._take_back(group, epoch + 1)

    def _on_admit(self, owner: list, key: str, tickets: list[int], version: str) -> None:
        for ticket in tickets:
            if ticket in self.groups:
                self.reissued.remove(ticket)
                self.groups[ticket].owner = tuple(owner)
            else:
                self.groups[ticket] = PromptGroup(tuple(owner))
                self.next_ticket = ticket + 1
            self._event(ticket, "admitted", version)
        heapq.heapify(self.reissued)
        _remember(self.admissions, key, tickets)

    def _on_fail(self, ticket: int, reason: str) -> None:
        self.groups[ticket].attempt += 1
        self.dropped[reason] += self.plan.samples_per_group
        self._event(ticket, "failed", reason=reason)

    def _on_put(
        self, key: str, shard: dict, rows: list[dict], fields: list[str], refused: dict[int, str], lease: int
    ) -> None:
        _remember(self.puts, key, refused)
        if rows:
            self.shards[self.next_shard] = Shard(shard, {row["ticket"] for row in rows})
            self._add_fields(self.next_shard, rows, fields)
            self.next_shard += 1
        else:
            self.garbage.append(shard["name"])
        for ticket, reason in refused.items():
            if reason in REJECTED and "token_ids" in fields:
                self._drop(ticket, reason)
        if lease:
            self._ack(lease)

    def _add_fields(self, number: int, rows: list[dict], fields: list[str]) -> None:
        for row in rows:
            group = self.groups[row["ticket"]]
            group.parts.append((number, tuple(fields)))
            for name in fields:
                group.present[name] = group.present.get(name, 0) | row["mask"]
            if "token_ids" in fields:
                group.width, group.versions = row["width"], frozenset(row["versions"])
                oldest = str(min(Version.decode(code) for code in row["versions"]))
                self._sample_events(row["ticket"], "accepted", oldest)
            else:
                self._event(row["ticket"], fields[0])
            if "old_logprob_version" in fields:
                group.old_version = row["versions"][0]

    def _on_claim(self, task: str, owner: list, key: str, number: int, tickets: list[int]) -> None:
        self.next_lease = number + 1
        shards = frozenset(shard for ticket in tickets for shard, _ in self.groups[ticket].parts)
        for shard in shards:
            self.shards[shard].leases += 1
        self.leases[number] = Lease(task, tuple(owner), key, tuple(tickets), shards)
        self.lease_keys[key] = number
        self.returned[task] = [window for window in self.returned[task] if window != tuple(tickets)]
        for ticket in tickets:
            self.groups[ticket].tasks[task] = number
        self._advance(task)

    def _on_release(self, lease: int) -> None:
        """The holder gives a lease back: what is left of its window is offered again as it was."""
        held = self._forget_lease(lease)
        for ticket in held.tickets:
            self.groups[ticket].tasks.pop(held.task, None)
        if held.tickets and self.plan.tasks[held.task].in_order:
            self.returned[held.task].append(held.tickets)
        self.position[held.task] = min([self.position[held.task], *held.tickets])

    def _on_trained(self, step: int, leases: list[int]) -> None:
        for lease in leases:
            self._ack(lease)
        self.trained_steps = step + 1
        size = self.plan.groups_per_step
        for ticket in range(step * size, (step + 1) * size):
            self._sample_events(ticket, "trained", str(Version(self.lineage[-1][0], step)))

    def _on_publish(self, version: str, digest: str) -> None:
        self.newest = Version.parse(version)
        self.published[self.newest] = digest

    def _on_retire(self, versions: list[str]) -> None:
        for version in versions:
            self.published.pop(Version.parse(version), None)

    def _on_serve(self, reader: str, owner: list, version: str) -> None:
        self.readers[reader] = (tuple(owner), Version.parse(version))

    def _on_evaluated(self, version: int) -> None:
        self.evaluated = max(self.evaluated, version)

    def _on_note(self, what: str, name: str, reason: str) -> None:
        self.noted[f"{what}/{reason}"] += 1
        self.events.append(Event(name, what, self.trained_steps, reason=reason))

    def _on_checkpoint(self, step: int, epoch: int, name: str, digest: str) -> None:
        self.checkpoints.append({"step": step, "epoch": epoch, "name": name, "digest": digest})
        self._retire_groups(step - self.plan.keep_steps)

    def _on_resume(self, epoch: int, step: int) -> None:
        self.lineage.append((epoch, step))
        self.trained_steps = step
        self.evaluated = min(self.evaluated, step)
        self.checkpoints = [point for point in self.checkpoints if point["step"] <= step]
        first = step * self.plan.groups_per_step
        self.next_ticket = max(self.next_ticket, first)
        for ticket in range(first, self.next_ticket):
            if ticket in self.groups:
                self._roll_back(ticket)
            else:
                self.groups[ticket] = PromptGroup(None)
                self._drop(ticket, "retired")
        for task in self.plan.tasks:
            self.position[task] = first
            self.returned[task] = []
            self._advance(task)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _roll_back(self, ticket: int) -> None:
        """After the lineage changed: drop what rolled-back weights made, give the rest back to the actor."""
        group = self.groups[ticket]
        if not all(self.in_lineage(Version.decode(code)) for code in group.versions):
            self._drop(ticket, "rolled_back")
            return
        if group.tasks.pop("actor", 0) == DONE:
            self._event(ticket, "returned")
        if group.old_version and not self.in_lineage(Version.decode(group.old_version)):
            fields = self.plan.tasks["actor_fwd"].gives
            gone = [part for part in group.parts if part[1] == fields]
            group.parts = [part for part in group.parts if part[1] != fields]
            for number, _ in gone:
                self._unpin(number, ticket)
            group.tasks.pop("actor_fwd", None)
            group.old_version = 0
            for name in fields:
                group.present.pop(name, None)

    def _drop(self, ticket: int, reason: str) -> None:
        """Count the samples of ``ticket`` as dropped and offer the ticket again."""
        self.dropped[reason] += self.plan.samples_per_group
        self._sample_events(ticket, "dropped", reason=reason)
        self._reset(ticket)

    def _reset(self, ticket: int) -> None:
        old = self.groups[ticket]
        for lease in [number for number in set(old.tasks.values()) if number != DONE]:
            held = self.leases[lease]
            held.tickets = tuple(other for other in held.tickets if other != ticket)
        for number, _ in old.parts:
            self._unpin(number, ticket)
        self.groups[ticket] = PromptGroup(None, attempt=old.attempt)
        heapq.heappush(self.reissued, ticket)

    def _ack(self, lease: int) -> None:
        """Consumed are the tickets that have what the task gives; others (their rows were refused) are ready again."""
        held = self._forget_lease(lease)
        gives = self.plan.tasks[held.task].gives
        for ticket in held.tickets:
            group = self.groups[ticket]
            if all(group.present.get(name) == self.full for name in gives):
                group.tasks[held.task] = DONE
            else:
                group.tasks.pop(held.task, None)
                self.position[held.task] = min(self.position[held.task], ticket)
        self._advance(held.task)

    def _take_back(self, group: str, below: int) -> None:
        """Release what incarnations of ``group`` before epoch ``below`` hold."""
        for number in [n for n, held in self.leases.items() if held.owner[0] == group and held.owner[1] < below]:
            self._on_release(number)
        for ticket, item in self.groups.items():
            if item.owner and item.owner[0] == group and item.owner[1] < below and not item.present:
                item.owner = None
                heapq.heappush(self.reissued, ticket)
        self.readers = {k: v for k, v in self.readers.items() if not (v[0][0] == group and v[0][1] < below)}

    def _forget_lease(self, number: int) -> Lease:
        held = self.leases.pop(number)
        self.lease_keys.pop(held.key, None)
        for shard in held.shards:
            self.shards[shard].leases -= 1
            self._collect(shard)
        return held

    def _advance(self, task: str) -> None:
        position = self.position[task]
        while position in self.groups and task in self.groups[position].tasks:
            position += 1
        self.position[task] = position

    def _retire_groups(self, below_step: int) -> None:
        end = below_step * self.plan.groups_per_step
        for ticket in [ticket for ticket in self.groups if ticket < end]:
            for number, _ in self.groups.pop(ticket).parts:
                self._unpin(number, ticket)

    def _unpin(self, number: int, ticket: int) -> None:
        self.shards[number].tickets.discard(ticket)
        self._collect(number)

    def _collect(self, number: int) -> None:
        """A shard that no ticket and no lease needs is garbage."""
        shard = self.shards[number]
        if not shard.tickets and not shard.leases:
            self.garbage.append(self.shards.pop(number).descriptor["name"])

    def _event(self, ticket: int, what: str, version: str = "", reason: str = "") -> None:
        self.events.append(Event(f"{ticket:09d}", what, self.plan.step_of(ticket), version, reason))

    def _sample_events(self, ticket: int, what: str, version: str = "", reason: str = "") -> None:
        step = self.plan.step_of(ticket)
        for k in range(self.plan.samples_per_group):
            self.events.append(Event(sample_id(ticket, k), what, step, version, reason))

    def take_events(self) -> Iterator[Event]:
        """Events since the last call."""
        events, self.events = self.events, []
        return iter(events)


def _remember(memory: dict[str, Any], key: str, value: Any) -> None:
    """Keep the answer to the request ``key``, and the latest few before it."""
    memory[key] = value
    while len(memory) > REMEMBERED:
        memory.pop(next(iter(memory)))
