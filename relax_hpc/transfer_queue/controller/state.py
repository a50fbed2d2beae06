"""The controller's memory: a deterministic state machine over journal records.

Every change goes through `apply(record)`, in a live controller and in a replay alike; planning methods only read.
Bookkeeping is by prompt group, whose number is its ticket. Symbols: t = step of a ticket, S = max_staleness,
V = version that an engine serves: a ticket is admitted only if V.number >= t - S (and V is not rolled back).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from relax_hpc.transfer_queue.controller import step_sets, windows
from relax_hpc.transfer_queue.controller.events import expand, lines
from relax_hpc.transfer_queue.controller.reply_cache import Answers
from relax_hpc.transfer_queue.controller.stock import ADMISSION, ALL, NEWS, Stock
from relax_hpc.transfer_queue.controller.tasks import DONE, READY
from relax_hpc.transfer_queue.controller.turns import Turns
from relax_hpc.transfer_queue.lengths import unpacked
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.records import FILTERED, NO_STEP, Event, Owner, PromptGroup, Shard
from relax_hpc.transfer_queue.samplers import Assignment, schedule
from relax_hpc.versions import Version

Record = dict[str, Any]
REJECTED = ("rolled_back", "stale_version", "incomplete", "unknown_media")
"""Why generated rows are dropped and their ticket is offered again."""
_ORIGINS = 4096


class QueueState(Stock, Turns):
    """See the module. Fields are read by the controller and by tests; only `apply` writes them."""

    def __init__(self, plan: Plan) -> None:
        Stock.__init__(self, plan)
        Turns.__init__(self)
        self.incarnations: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.admissions, self.puts = Answers(), Answers()
        self.noted: Counter[str] = Counter()
        self.lineage: list[tuple[int, int]] = []
        self.published: dict[Version, str] = {}
        """Version -> digest of its manifest."""
        self.filed: dict[Version, str] = {}
        """Those of them that are on disk too -> digest of the listing of its files."""
        self.newest: Version | None = None
        self.readers: dict[str, tuple[Owner, Version]] = {}
        self.checkpoints: list[dict[str, Any]] = []
        self.trained_steps = 0
        self.evaluated = -1
        self.gathered = 0
        """Of lower steps nothing is left to be gathered into files of a step."""
        self.origins: dict[tuple[int, ...], tuple[bool, int]] = {}
        """What `origin` has found out in this lineage."""

    # -- reading -----------------------------------------------------------------------------------------------

    def in_lineage(self, version: Version) -> bool:
        """Whether ``version`` survives: its incarnation trained, and no later incarnation resumed below its number."""
        incarnations = [incarnation for incarnation, _ in self.lineage]
        if version.incarnation not in incarnations:
            return False
        later = self.lineage[incarnations.index(version.incarnation) + 1 :]
        return all(version.number <= start for _, start in later)

    def origin(self, codes: tuple[int, ...]) -> tuple[bool, int]:
        """Of encoded versions: whether all of them survive, and the lowest number (-1 if there are none)."""
        if codes not in self.origins:
            if len(self.origins) >= _ORIGINS:
                self.origins.clear()
            versions = [Version.decode(code) for code in codes]
            lowest = min((version.number for version in versions), default=-1)
            self.origins[codes] = all(map(self.in_lineage, versions)), lowest
        return self.origins[codes]

    def over(self, owner: Owner) -> int:
        """0 while ``owner`` may speak for its group, else the lowest incarnation that may."""
        group, incarnation = owner
        lowest = max(self.incarnations.get(group, 0), self.ended.get(group, 0) + 1)
        return lowest if incarnation < lowest else 0

    def newer(self, after: Version, multiple_of: int = 1) -> Version | None:
        """The newest published version, if it is in the lineage and above ``after``; of those whose numbers are
        multiples, if that is asked for."""
        newest = self.newest if multiple_of == 1 else self._newest_of(self.published, multiple_of)
        return newest if newest is not None and newest > after and self.in_lineage(newest) else None

    def _newest_of(self, versions: Iterable[Version], multiple_of: int) -> Version | None:
        """Of the lineage."""
        found = (version for version in versions if not version.number % multiple_of)
        return max(filter(self.in_lineage, found), default=None)

    def finished(self) -> bool:
        """Every step is trained, the last weights are saved, and evaluated if evaluation is on."""
        steps = self.plan.steps
        if self.trained_steps < steps or (self.plan.eval_every and self.evaluated < steps):
            return False
        return any(point["step"] >= steps for point in self.checkpoints)

    def awaited(self, task: str, budget: int, boundary: int, padded: bool = True) -> tuple[str, str]:
        """The role that ``task`` waits for while nothing is `claimable`, and for what of it."""
        queue = self.tasks[task]
        if queue.in_sets and step_sets.next_window(self, task, budget, boundary, padded)[1]:
            peer = windows.awaited(self, task, step_sets.straggler(self, task))
            return peer, f"stragglers of {peer}"
        peer = windows.awaited(self, task, queue.lowest_waiting())
        return peer, f"rows of {peer}"

    def claimable(self, task: str, budget: int, boundary: int, padded: bool = True) -> tuple[int, ...]:
        """The next window of ``task``: ready tickets whose tokens fit ``budget`` (one group always fits).

        Rows count as the longest of the window or, not ``padded``, as long as they are. A window never crosses a
        multiple of ``boundary`` tickets. In order, it is known to be complete: the group behind it would not fit, or
        the boundary is reached.
        """
        queue = self.tasks[task]
        if queue.whole_step:
            return windows.whole_step(self, task, boundary)
        edge = (queue.position // boundary + 1) * boundary
        for window in queue.returned:
            # One from behind the boundary waits until all before it was taken.
            if window[0] < edge and all(queue.statuses[ticket] == READY for ticket in window):
                return windows.fitting(self, window, budget, padded)
        if queue.in_sets:
            return step_sets.next_window(self, task, budget, boundary, padded)[0]
        cut = windows.in_order if queue.in_order else windows.as_ready
        return cut(self, task, budget, boundary, padded)

    def assignment(self, tickets: Sequence[int], ranks: int, max_tokens: int, batch: int) -> Assignment:
        """The rows of window number ``batch`` dealt to data ranks, in micro-batches of ``max_tokens``."""
        samples = self.plan.samples_per_prompt
        lengths = [tokens for ticket in tickets for tokens in unpacked(self.groups[ticket].lengths, samples)]
        return schedule(dict(enumerate(lengths)), ranks, max_tokens, batch)

    def retirable(self) -> list[Version]:
        """Published versions below the newest that no reader serves or may still be loading, oldest first."""
        if self.newest is None:
            return []
        wanted = [self.newest, *(version for _, version in self.readers.values())]
        # What is in memory alone goes with the actor.
        wanted += [newest] if (newest := self.newest_filed()) else []
        if every := self.plan.refresh_every:
            wanted += [newest] if (newest := self.newest_filed(every)) else []
        floor = min(wanted)
        return sorted(version for version in self.published if version < floor)

    def newest_filed(self, multiple_of: int = 1) -> Version | None:
        """The newest version of the lineage that is on disk, of those whose numbers are multiples."""
        return self._newest_of(self.filed, multiple_of)

    def safe(self, tickets: Collection[int], needs: int) -> bool:
        """Whether these prompt groups have all fields in ``needs``, none of which can be lost with its maker."""
        groups = [self.groups.get(ticket) for ticket in tickets]
        return all(group and self.has(group, needs) for group in groups) and not self.shelf.waits_for_disk(tickets)

    def staleness(self, step: int) -> list[int]:
        """Of each prompt group of ``step``: the version trained minus the oldest version of its tokens."""
        groups = (self.groups.get(ticket) for ticket in self.tickets_of(step))
        return [step - self.origin(tuple(group.versions))[1] for group in groups if group]

    def publish_lag(self, step: int) -> int:
        """Version ``step``, which was trained, minus the oldest that anybody generates or scores with."""
        served = [version for _, version in self.readers.values() if self.in_lineage(version)]
        return step - min((version.number for version in served), default=step)

    def depth(self) -> dict[str, int]:
        """Prompt groups by how far they are: in generation, waiting for training."""
        return {"generating": len(self.generating), "ready": len(self.untrained), "reissued": len(self.reissued)}

    def covered_steps(self) -> range:
        """Steps that a checkpoint covers, whose rows are kept and not gathered yet."""
        covered = self.checkpoints[-1]["step"] if self.checkpoints else 0
        first = max(self.gathered, self.first_place // self.plan.prompts_per_step)
        return range(first, max(first, min(covered, self.trained_steps)))

    # -- changing ----------------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Carry out one journal record. Deterministic; records are checked before they are journaled."""
        about = dict(record)
        getattr(self, "_on_" + about.pop("op"))(**about)

    def _on_register(self, group: str, incarnation: int) -> None:
        if incarnation > self.incarnations.get(group, 0):
            self.incarnations[group] = incarnation
            self._end_incarnations(group, incarnation)

    def _on_down(self, group: str, incarnation: int) -> None:
        self.ended[group] = max(incarnation, self.ended.get(group, 0))
        self._end_incarnations(group, incarnation + 1)

    def _end_incarnations(self, group: str, below: int) -> None:
        """Release what incarnations of ``group`` before incarnation ``below`` hold."""
        for number in [n for n, held in self.leases.items() if held.owner[0] == group and held.owner[1] < below]:
            self._release(number)
        self._take_tickets_back(group, below)
        for number in self.shelf.unsaved_of(group, below):
            self._lose(number)
        self.readers = {k: v for k, v in self.readers.items() if not (v[0][0] == group and v[0][1] < below)}
        self._begin_turns(group)
        self.admissions.forget(group, below)
        self.puts.forget(group, below)
        self.woken.add(ALL)

    def _on_admit(
        self, owner: list, key: str, tickets: list[int], version: str, surplus: dict[int, int] | None = None
    ) -> None:
        self._admit(tickets, (owner[0], owner[1]), version)
        self._bind(surplus or {})
        self.admissions.remember(key, (owner[0], owner[1]), tickets)

    def _on_fail(self, ticket: int, reason: str) -> None:
        self.groups[ticket].attempt += 1
        self.groups[ticket].filtered += reason == FILTERED
        self._lose_kept(ticket, reason)
        self.dropped[reason] += self.plan.samples_per_prompt
        self._tell("failed", [ticket], reason=reason)

    def _on_bind(self, surplus: dict[int, int]) -> None:
        self._bind(surplus)

    def _on_spared(self, key: str, owner: list, tickets: list[int], reason: str) -> None:
        self.puts.remember(key, (owner[0], owner[1]), {})
        self.dropped[reason] += self.plan.samples_per_prompt * len(tickets)
        self._tell("failed", tickets, reason=reason)

    def _on_put(
        self,
        key: str,
        owner: list,
        shard: dict,
        rows: list[list],
        fields: list[str],
        refused: dict[int, str],
        lease: int,
        saved: bool,
        reused: dict[int, int] | None = None,
    ) -> None:
        who = (owner[0], owner[1])
        self.puts.remember(key, who, refused)
        for ticket, tokens in (reused or {}).items():
            self.kept.groups[ticket].reused = tokens
        if rows:
            self._store(who, shard, tuple(fields), rows, saved)
        else:
            self.shelf.garbage.append(shard["name"])
        for ticket, reason in refused.items():
            if reason in REJECTED and "token_ids" in fields:
                self._drop(ticket, reason)
        if lease:
            self._ack(lease)

    def _on_keep(
        self,
        key: str,
        owner: list,
        shard: dict,
        rows: list[list],
        fields: list[str],
        surplus: bool,
        refused: dict[int, str],
    ) -> None:
        who = (owner[0], owner[1])
        self.puts.remember(key, who, refused)
        for ticket, _, samples, *_ in [row for row in rows if row[0] in refused]:
            tokens = sum(sample[1] for sample in samples)
            self.kept.total += tokens
            self.kept.lost[refused[ticket]] += tokens
        taken = [row for row in rows if row[0] not in refused]
        count = sum(len(row[2]) for row in taken)
        if count:
            number = self.shelf.add(Shard(shard, tuple(fields), who, (), count, count))
            self._keep(number, taken, surplus)
        else:
            self.shelf.garbage.append(shard["name"])

    def _on_gathered(self, owner: list, end: int, files: list) -> None:
        for descriptor, tickets in files:
            self._gather((owner[0], owner[1]), descriptor, tickets)
        self.gathered = max(self.gathered, end)

    def _on_media(self, ticket: int, ids: list[str]) -> None:
        self.media.hold(ticket, ids)

    def _on_quarantine(self, tickets: list[int], reason: str) -> None:
        for ticket in tickets:
            self._drop(ticket, reason)
            self.groups[ticket].attempt += 1

    def _on_saved(self, shards: list[int]) -> None:
        for number in shards:
            self._saved(number)

    def _on_claim(
        self, task: str, owner: list, key: str, number: int, tickets: list[int], assignment: Assignment
    ) -> None:
        self._claim(task, (owner[0], owner[1]), key, number, tuple(tickets), assignment)

    def _on_release(self, lease: int) -> None:
        self._release(lease)

    def _on_trained(self, step: int, leases: list[int]) -> None:
        for lease in leases:
            self._ack(lease)
        self.trained_steps = step + 1
        self._train(self.tickets_of(step), str(Version(self.lineage[-1][0], step)))
        self._lose_stale()

    def _on_publish(self, version: str, digest: str) -> None:
        self.newest = Version.parse(version)
        self.published[self.newest] = digest
        self.woken.add(NEWS)

    def _on_retire(self, versions: list[str]) -> None:
        for version in versions:
            self.published.pop(Version.parse(version), None)
            self.filed.pop(Version.parse(version), None)

    def _on_filed(self, version: str, digest: str) -> None:
        self.filed[Version.parse(version)] = digest

    def _on_serve(self, reader: str, owner: list, version: str) -> None:
        self.readers[reader] = ((owner[0], owner[1]), Version.parse(version))
        self.woken.add(ADMISSION)

    def _on_evaluated(self, version: int) -> None:
        self.evaluated = max(self.evaluated, version)
        self.woken.add(ALL)

    def _on_note(self, what: str, name: str, reason: str) -> None:
        self.noted[f"{what}/{reason}"] += 1
        self.told.append(Event(name, what, self.trained_steps, reason=reason))

    def _on_checkpoint(self, step: int, incarnation: int, name: str, digest: str) -> None:
        self.checkpoints.append({"step": step, "incarnation": incarnation, "name": name, "digest": digest})
        self._retire((step - self.plan.keep_steps) * self.plan.prompts_per_step)
        self.woken.add(ALL)

    def _on_resume(self, incarnation: int, step: int) -> None:
        self.lineage.append((incarnation, step))
        self.origins.clear()
        self.rested.clear()
        self.trained_steps = step
        self.evaluated = min(self.evaluated, step)
        self.gathered = min(self.gathered, step)
        self.checkpoints = [point for point in self.checkpoints if point["step"] <= step]
        first = step * self.plan.prompts_per_step
        self.next_ticket = max(self.next_ticket, first)
        self.first_place = min(self.first_place, first)
        undone = self._cut_order(first) if self.in_sets else range(first, self.next_ticket)
        for ticket in undone:
            if ticket in self.groups:
                self._roll_back(ticket, self.groups[ticket])
            else:
                self.groups[ticket] = PromptGroup(None)
                self._drop(ticket, "retired")
        self._lose_rolled_back()
        for queue in self.tasks.values():
            queue.rewind(min(undone, default=self.next_ticket) if self.in_sets else first)
        self.woken.add(ALL)

    def _cut_order(self, first: int) -> list[int]:
        """Forget the order of training from place ``first`` on; all admitted tickets that were not trained before."""
        again = [ticket for ticket in self.order[first:] if ticket != NO_STEP]
        for ticket in filter(self.groups.__contains__, again):
            self.groups[ticket].place = NO_STEP
        del self.order[first:]
        waiting = {ticket for ticket, group in self.groups.items() if group.place == NO_STEP}
        # Who resumes behind all that the queue knows was trained on tickets that it does not know.
        unknown = (ticket for ticket in range(self.next_ticket) if ticket not in waiting)
        self.order.extend(islice(unknown, len(self.order), first) if len(self.order) < first else ())
        return sorted(waiting.union(again))

    def _roll_back(self, ticket: int, group: PromptGroup) -> None:
        """After the lineage changed: drop what rolled-back weights made, give the rest back to the actor."""
        if not self.origin(tuple(group.versions))[0]:
            self._drop(ticket, "rolled_back")
            return
        latest = self.trained_steps + self.plan.max_staleness
        if group.owner and self.plan.step_of(ticket) <= latest:
            # Whoever goes on with it may do so by the version that was resumed from.
            group.last = min(group.last, latest)
        if self.tasks["actor"].statuses[ticket] == DONE:
            self._untrain(ticket)
        if group.old_version and not self.origin((group.old_version,))[0]:
            for part in [part for part in group.parts if self.bits.of(part[1]) & self.scored]:
                self._withdraw(ticket, part)

    # -- telling -----------------------------------------------------------------------------------------------

    def take_events(self) -> Iterator[Event]:
        """Events since the last call, one a sample."""
        told, self.told = self.told, []
        return expand(told)

    def take_lines(self) -> bytes:
        """The same as lines of JSON."""
        told, self.told = self.told, []
        return lines(told)
