"""Prompt groups and what becomes of them: generated, stored, accepted, claimed, consumed, trained, dropped, retired.

All of it is reached through the records that `QueueState` applies; every method costs by what it changes.
"""

from __future__ import annotations

import bisect
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby

from relax_hpc.transfer_queue.controller.events import Told
from relax_hpc.transfer_queue.controller.kept import Keeping, Kept, KeptGroup
from relax_hpc.transfer_queue.controller.media_counts import MediaCounts
from relax_hpc.transfer_queue.controller.shelf import Shelf
from relax_hpc.transfer_queue.controller.tasks import DONE, HELD, TaskQueue
from relax_hpc.transfer_queue.controller.tickets import Place, TicketSet
from relax_hpc.transfer_queue.lengths import unpacked
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.records import NO_STEP, Event, FieldBits, Lease, Owner, Part, PromptGroup, Shard
from relax_hpc.transfer_queue.samplers import Assignment, of_rows
from relax_hpc.versions import Version

ADMISSION, DISK, NEWS, ALL = "admission", "disk", "news", "all"
"""With `rows_for`, what requests wait for; ALL may end any wait."""


def rows_for(task: str) -> str:
    """What a claim of ``task`` waits for."""
    return f"rows for {task}"


class Stock(Keeping):
    """See the module. Fields are read by others; only `QueueState.apply` has them changed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.full = (1 << plan.samples_per_prompt) - 1
        """Bit mask of all samples of a prompt group."""
        self.bits = FieldBits(name for task in plan.tasks.values() for name in (*task.needs, *task.gives))
        self.generated, self.scored = self.bits.of(("token_ids",)), self.bits.of(("old_logprob_version",))
        self.groups: dict[int, PromptGroup] = {}
        self.first_place = 0
        """In the order of training, of those in `groups`; what was trained before is retired."""
        self.order = array("q")
        """Tickets by place in the order of training, NO_STEP where there is none yet; without use where
        steps have no sets, and places are tickets."""
        self.next_ticket = 0
        self.reissued = TicketSet()
        self.generating = Place()
        """Prompt groups without rows, those whose tickets nobody has included."""
        self.untrained = Place()
        """Prompt groups with rows that wait for training."""
        self.tasks = {
            name: TaskQueue(
                self.bits.of(task.needs), self.bits.of(task.gives), task.in_order, task.whole_step, task.in_sets
            )
            for name, task in plan.tasks.items()
        }
        self.in_sets = [name for name, task in plan.tasks.items() if task.in_sets]
        """Tasks that take steps' sets; none: step t trains the tickets of t."""
        self.leases: dict[int, Lease] = {}
        self.lease_keys: dict[str, int] = {}
        self.next_lease = 1
        self.shelf = Shelf()
        self.kept = Kept()
        self.media = MediaCounts()
        self.dropped: Counter[str] = Counter()
        self.accepted = 0
        self.told: list[Event | Told] = []
        self.woken: set[str] = set()
        """What parked requests wait for and may have come since it was last emptied."""

    @property
    def shards(self) -> dict[int, Shard]:
        return self.shelf.shards

    def has(self, group: PromptGroup, bits: int) -> bool:
        """Whether it has all these fields."""
        return group.present & bits == bits

    def places(self, group: PromptGroup, bits: int) -> list[int]:
        """Numbers of the shards where any of these fields lie, each once."""
        found = [number for number, fields in group.parts if self.bits.of(fields) & bits]
        return found if len(found) == 1 else list(dict.fromkeys(found))

    def tickets_of(self, step: int) -> Sequence[int]:
        """What ``step`` trains, as far as that is decided; ascending where steps have no sets."""
        size = self.plan.prompts_per_step
        places = range(step * size, (step + 1) * size)
        if not self.in_sets:
            return places
        return [ticket for ticket in self.order[places.start : places.stop] if ticket != NO_STEP]

    def step_of(self, ticket: int) -> int:
        """The step that trains ``ticket``, or for which it is admitted while that is not decided."""
        group = self.groups.get(ticket)
        return self.plan.step_of(ticket if group is None or group.place == NO_STEP else group.place)

    def last_step(self, codes: Iterable[int]) -> int:
        """The last step that may train tokens of these encoded versions; NO_STEP if there are none."""
        oldest = self.origin(tuple(codes))[1]
        return oldest + self.plan.max_staleness if oldest >= 0 else NO_STEP

    def _last_kept(self, ticket: int) -> int:
        """The same of what is kept of ``ticket``."""
        return self.last_step(self.kept.groups[ticket].versions) if ticket in self.kept.groups else NO_STEP

    def _take_place(self, tickets: Iterable[int]) -> None:
        """They take the first free places in the order of training, as they come."""
        place = self.trained_steps * self.plan.prompts_per_step
        for ticket in tickets:
            while place < len(self.order) and self.order[place] != NO_STEP:
                place += 1
            self.order.extend([NO_STEP] * (place + 1 - len(self.order)))
            self.order[place] = ticket
            self.groups[ticket].place = place

    def _leave_place(self, ticket: int) -> None:
        group = self.groups[ticket]
        if group.place != NO_STEP:
            self.order[group.place], group.place = NO_STEP, NO_STEP

    # -- generation --------------------------------------------------------------------------------------------

    def _admit(self, tickets: Sequence[int], owner: Owner, version: str) -> None:
        again = [ticket for ticket in tickets if ticket in self.groups]
        fresh = [ticket for ticket in tickets if ticket not in self.groups]
        for ticket in again:
            self.reissued.discard(ticket)
            self.groups[ticket].owner = owner
        self.groups.update((ticket, PromptGroup(owner)) for ticket in fresh)
        self.next_ticket = max([self.next_ticket, *(ticket + 1 for ticket in fresh)])
        self.generating.discard(again)
        self.generating.add(tickets)
        last = Version.parse(version).number + self.plan.max_staleness
        for ticket in tickets:
            self.groups[ticket].last = min(last, self._last_kept(ticket)) if ticket in self.kept.groups else last
        self._tell("admitted", tickets, version)

    def _take_tickets_back(self, group: str, below: int) -> None:
        for ticket in sorted(self.generating):
            owner = self.groups[ticket].owner
            if owner and owner[0] == group and owner[1] < below:
                self.groups[ticket].owner = None
                self._reissue(ticket)

    def _reissue(self, ticket: int) -> None:
        self.reissued.add(ticket)
        self.groups[ticket].last = self._last_kept(ticket)
        # Who waits to train may wait for it no more.
        self.woken |= {ADMISSION, *map(rows_for, self.in_sets)}

    # -- rows --------------------------------------------------------------------------------------------------

    def _store(self, owner: Owner, descriptor: dict, fields: tuple, rows: Sequence[Sequence], saved: bool) -> None:
        """Fields of prompt groups, whose rows are (ticket, lengths, versions), lie in a new shard."""
        tickets, bits = [row[0] for row in rows], self.bits.of(fields)
        if bits & self.generated:
            self.generating.discard(tickets)
            self.untrained.add(tickets)
        shard = Shard(descriptor, fields, owner, () if saved else tuple(tickets), len(tickets))
        shard.untrained = sum(map(self.untrained.__contains__, tickets))
        part = (self.shelf.add(shard), fields)
        for ticket, lengths, versions in rows:
            group = self.groups[ticket]
            group.parts += (part,)
            group.present |= bits
            if bits & self.generated:
                group.lengths, group.width = lengths, max(unpacked(lengths, self.plan.samples_per_prompt))
                group.versions, group.owner = same(tuple(versions)), None
                group.last = self.last_step(versions)
            if bits & self.scored:
                group.old_version = versions[0]
        for name, queue in self.tasks.items():
            if queue.needs & bits:
                self._offer(name, tickets, bits)
        if saved:
            self._count(part, tickets)

    def _offer(self, task: str, tickets: Sequence[int], came: int) -> None:
        """Fields came to ``tickets``: ``task`` may have waited for them."""
        groups, needs = self.groups, self.tasks[task].needs
        if came & needs != needs:
            tickets = [ticket for ticket in tickets if groups[ticket].present & needs == needs]
        if tickets:
            self.tasks[task].offer(tickets)
        self.woken.add(rows_for(task))

    def _saved(self, number: int) -> None:
        part = (number, self.shards[number].fields)
        waited = self.shelf.saved(number)
        self._count(part, [ticket for ticket in waited if self._lies_in(ticket, part)])

    def _count(self, part: Part, tickets: Sequence[int]) -> None:
        """The fields of ``part`` are on disk, or as safe as was asked for: from now on they count."""
        self.woken.add(DISK)
        if self.bits.of(part[1]) & self.generated:
            self._accept(tickets)
        else:
            late = self.shelf.unsaved
            self._tell_given(part[1], [ticket for ticket in tickets if self._accepted(ticket)] if late else tickets)

    def _accept(self, tickets: Sequence[int]) -> None:
        for versions, same in groupby(tickets, lambda ticket: self.groups[ticket].versions):
            accepted = list(same)
            self.accepted += len(accepted) * self.plan.samples_per_prompt
            self._tell_samples("accepted", accepted, _oldest(versions))
        if self.kept.groups:
            self._use_kept(tickets)
        for ticket in [ticket for ticket in tickets if len(self.groups[ticket].parts) > 1]:
            for number, fields in self.groups[ticket].parts[1:]:
                if not self.shards[number].unsaved:
                    self._tell_given(fields, [ticket])

    def _accepted(self, ticket: int) -> bool:
        return not self.shards[self.groups[ticket].parts[0][0]].unsaved

    def _lose(self, number: int) -> None:
        """Nobody can save the shard any more: who made it is gone."""
        shard = self.shards[number]
        part, waited = (number, shard.fields), self.shelf.saved(number)
        for ticket in [ticket for ticket in waited if self._lies_in(ticket, part)]:
            if self.bits.of(shard.fields) & self.generated:
                self._drop(ticket, "lost")
            else:
                self._withdraw(ticket, part)
                self._tell("lost", [ticket], reason=shard.fields[0])
        self.woken.add(DISK)

    def _lies_in(self, ticket: int, part: Part) -> bool:
        return ticket in self.groups and part in self.groups[ticket].parts

    def _withdraw(self, ticket: int, part: Part) -> None:
        """Take the fields of ``part`` from a prompt group: whose task gave them must give them again."""
        group = self.groups[ticket]
        group.parts = tuple(other for other in group.parts if other != part)
        group.present = 0
        for _, fields in group.parts:
            group.present |= self.bits.of(fields)
        if not self.has(group, self.scored):
            group.old_version = 0
        self.shelf.drop(part[0], 1, int(ticket in self.untrained))
        for name, queue in self.tasks.items():
            status = queue.statuses[ticket]
            if status != HELD and not (status == DONE and self.has(group, queue.gives)):
                self._reopen(name, ticket)

    def _reopen(self, task: str, ticket: int) -> None:
        """``ticket`` is not taken by ``task``, or not any more."""
        queue = self.tasks[task]
        queue.reopen(ticket, self.has(self.groups[ticket], queue.needs))
        self.woken.add(rows_for(task))

    def _leave_shards(self, group: KeptGroup) -> None:
        """It is not kept any more."""
        for number, count in group.shards.items():
            self.shelf.drop(number, count, count)
        self.woken.add(ADMISSION)

    def _gather(self, owner: Owner, descriptor: dict, tickets: Sequence[int]) -> None:
        """All fields of these prompt groups lie in one file from now on, each as what was put together before."""
        held = {ticket: self.groups[ticket].parts for ticket in tickets}
        parts = [part for ticket in tickets for part in held[ticket]]
        fields = tuple(dict.fromkeys(field for _, some in parts for field in some))
        shard = Shard(descriptor, fields, owner, (), len(parts))
        shard.untrained = sum(len(held[ticket]) for ticket in tickets if ticket in self.untrained)
        number, same_part = self.shelf.add(shard), dict[tuple[str, ...], Part]()
        for ticket in tickets:
            self.groups[ticket].parts = tuple(same_part.setdefault(some, (number, some)) for _, some in held[ticket])
            for old, _ in held[ticket]:
                self.shelf.drop(old, 1, int(ticket in self.untrained))

    # -- leases ------------------------------------------------------------------------------------------------

    def _claim(
        self, task: str, owner: Owner, key: str, number: int, tickets: tuple[int, ...], assignment: Assignment
    ) -> None:
        self.next_lease = number + 1
        needs = self.tasks[task].needs
        shards = tuple(sorted({shard for ticket in tickets for shard in self.places(self.groups[ticket], needs)}))
        self.shelf.hold(shards)
        self.leases[number] = Lease(task, owner, key, tickets, shards, assignment)
        self.lease_keys[key] = number
        self.tasks[task].take(tickets)
        if self.tasks[task].in_sets:
            self._take_place(tickets)
        if self.tasks[task].in_order:
            self.woken.add(rows_for(task))

    def _release(self, number: int) -> None:
        """The holder gives a lease back: what is left of its window is offered again as it was."""
        held = self._end_lease(number)
        queue = self.tasks[held.task]
        # A whole step may have been taken for a few of its tickets.
        tickets = tuple(ticket for ticket in held.tickets if queue.statuses[ticket] == HELD)
        for ticket in tickets:
            if queue.in_sets:
                self._leave_place(ticket)
            self._reopen(held.task, ticket)
        if tickets and queue.in_order:
            bisect.insort(queue.returned, tickets)

    def _ack(self, number: int) -> None:
        """Consumed are the tickets that have what the task gives; others (their rows were refused) are ready again."""
        held = self._end_lease(number)
        groups, queue = self.groups, self.tasks[held.task]
        given = [ticket for ticket in held.tickets if groups[ticket].present & queue.gives == queue.gives]
        queue.consume(given)
        if len(given) < len(held.tickets):
            for ticket in set(held.tickets).difference(given):
                self._reopen(held.task, ticket)

    def _end_lease(self, number: int) -> Lease:
        held = self.leases.pop(number)
        self.lease_keys.pop(held.key, None)
        self.shelf.let_go(held.shards)
        return held

    def _leave_leases(self, tickets: Sequence[int]) -> None:
        first, end = min(tickets), max(tickets) + 1
        if any(queue.statuses.find(HELD, first, end) >= 0 for queue in self.tasks.values()):
            gone = set(tickets)
            for held in self.leases.values():
                if not gone.isdisjoint(held.tickets):
                    self._shrink(held, gone)

    def _shrink(self, held: Lease, gone: set[int]) -> None:
        size = self.plan.samples_per_prompt
        places = [place for place, ticket in enumerate(held.tickets) if ticket not in gone]
        rows = [place * size + k for place in places for k in range(size)]
        held.tickets, held.assignment = tuple(held.tickets[place] for place in places), of_rows(held.assignment, rows)

    # -- ends --------------------------------------------------------------------------------------------------

    def _train(self, tickets: Sequence[int], version: str) -> None:
        self.untrained.discard(tickets)
        for number, count in self._parts_of(tickets).items():
            self.shelf.count_untrained(number, -count)
        self._tell_samples("trained", tickets, version, step=Version.parse(version).number)
        self.woken.add(ADMISSION)

    def _parts_of(self, tickets: Iterable[int]) -> Counter[int]:
        """Shards in which they lie, and how many of them in each."""
        return Counter([number for ticket in tickets for number, _ in self.groups[ticket].parts])

    def _untrain(self, ticket: int) -> None:
        """What the actor has made of it is undone."""
        for number, _ in self.groups[ticket].parts:
            self.shelf.count_untrained(number, 1)
        self.untrained.add([ticket])
        self._leave_place(ticket)
        self._reopen("actor", ticket)
        self._tell("returned", [ticket])

    def _drop(self, ticket: int, reason: str) -> None:
        """Count the samples of ``ticket`` as dropped and offer the ticket again."""
        self.dropped[reason] += self.plan.samples_per_prompt
        self._tell_samples("dropped", [ticket], reason=reason)
        if reason != "lost":
            self._lose_kept(ticket, reason)
        group = self.groups[ticket]
        self._leave_place(ticket)
        self._detach([ticket])
        self.groups[ticket] = PromptGroup(None, group.attempt, group.filtered)
        self.generating.add([ticket])
        for name in self.tasks:
            self._reopen(name, ticket)
        self._reissue(ticket)

    def _detach(self, tickets: Sequence[int]) -> None:
        """No shard, lease or place knows them any more. All of them wait for training, or none."""
        if untrained := tickets[0] in self.untrained:
            self.untrained.discard(tickets)
        for number, count in self._parts_of(tickets).items():
            self.shelf.drop(number, count, count * untrained)
        self._leave_leases(tickets)
        self.generating.discard(tickets)

    def _retire(self, end: int) -> None:
        """Forget prompt groups whose place in the order of training is lower than ``end``."""
        gone = range(self.first_place, end)
        if self.in_sets:
            gone = [ticket for ticket in self.order[gone.start : max(gone.start, end)] if ticket != NO_STEP]
        for _, run in groupby(gone, lambda ticket: ticket in self.untrained):
            if tickets := [ticket for ticket in run if ticket in self.groups]:
                self._detach(tickets)
                for ticket in tickets:
                    self.reissued.discard(ticket)
                    self.media.release(ticket)
                    del self.groups[ticket]
        self.first_place = max(self.first_place, end)
        below = min(self.groups, default=self.next_ticket) if self.in_sets else end
        for queue in self.tasks.values():
            queue.forget(below)

    # -- telling -----------------------------------------------------------------------------------------------

    def _tell(self, what: str, tickets: Sequence[int], version: str = "", reason: str = "") -> None:
        if tickets:
            self.told.append(Told(what, tickets, 0, self.plan.prompts_per_step, version, reason))

    def _tell_given(self, fields: tuple[str, ...], tickets: Sequence[int]) -> None:
        """A task has given ``fields``; where they are scores, by which version."""
        if not self.bits.of(fields) & self.scored:
            self._tell(fields[0], tickets)
            return
        for version, scored in groupby(tickets, lambda ticket: self.groups[ticket].old_version):
            self._tell(fields[0], list(scored), str(Version.decode(version)))

    def _tell_samples(
        self, what: str, tickets: Sequence[int], version: str = "", reason: str = "", step: int = NO_STEP
    ) -> None:
        size = self.plan.samples_per_prompt
        self.told.append(Told(what, tickets, size, self.plan.prompts_per_step, version, reason, step))


@lru_cache(maxsize=4096)
def same(codes: tuple[int, ...]) -> frozenset[int]:
    """One object for all prompt groups with the same ones."""
    return frozenset(codes)


@lru_cache(maxsize=4096)
def _oldest(codes: frozenset[int]) -> str:
    return str(min(Version.decode(code) for code in codes))
