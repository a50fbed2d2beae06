"""Turns tickets into prompt groups in the queue: as many at a time as an engine may have, each put when it is done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_hpc.engines.engine import BadAnswer, Draft, Episode, Generation
from relax_hpc.errors import RelaxError
from relax_hpc.roles.context import END
from relax_hpc.rollout.episodes import Repeat, play
from relax_hpc.rollout.outcomes import Failure, generated
from relax_hpc.rollout.partial import PartialGroup
from relax_hpc.rollout.saving import Saving
from relax_hpc.rollout.spares import Spare, has_spare
from relax_hpc.transfer_queue.client import Admission, NextAttempt, Partial
from relax_hpc.transfer_queue.client.partials import Leftover, keep, kept_rows
from relax_hpc.transfer_queue.records import FILTERED

if TYPE_CHECKING:
    from relax_hpc.roles.replica import Replica

_SURPLUS = "surplus"
"""Why a spare group that nobody needs is dropped."""
_KEEP_S = 10.0
"""For the queue to take spare groups, which are no loss."""


class TicketWorker:
    """Asks for as many tickets as its engine has places for, and works on each of them by itself."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.rollout = replica, replica.rollout
        self.config, self.client = replica.config, replica.rollout.client
        shape = self.config.rollout
        self.free = shape.groups_per_request * shape.requests_in_flight
        """Prompt groups that the engine could work on beside those that it has."""
        self.left = asyncio.Event()
        """Set when one has been put."""
        self.saving = Saving(self.client, shape)
        self.keeps_surplus = self.config.max_staleness > 0
        """For tickets to come; if not, nobody may be trained on them any more."""
        self.spares = 0
        """Being drawn, needed or not."""
        self.handing_over: set[asyncio.Task[None]] = set()
        """Spares that nobody needed."""

    async def serve(self) -> None:
        """Take tickets and turn them into rows, until there are no more or the engine leaves."""
        try:
            async with self.saving.running(), asyncio.TaskGroup() as tasks:
                while admitted := await self.admitted():
                    self.replica.activity.because(admitted.waited)
                    for ticket, failures in admitted.failures.items():
                        self.rollout.outcomes.count_lost(ticket, failures, "rows that were dropped after they were put")
                    wanted = list(zip(admitted.tickets, admitted.attempts, strict=True))
                    await asyncio.to_thread(self.rollout.source.fetch, wanted)
                    for ticket, attempt in wanted:
                        self.free -= 1
                        kept = [partial for partial in admitted.partials if partial.ticket == ticket]
                        tasks.create_task(self.fill(ticket, attempt, kept))
            self.replica.activity.because(END)
        finally:
            for task in self.handing_over:
                task.cancel()
            await asyncio.gather(*self.handing_over, return_exceptions=True)

    async def admitted(self) -> Admission | None:
        """The next tickets, once there is room for one; None: there will be none."""
        while self.free <= 0:
            self.left.clear()
            await self.left.wait()
        asking = self.client.tickets.admit(self.replica.reader.reader, self.free)
        return await self.replica.unless_leaving(asyncio.wrap_future(asking))

    async def fill(self, ticket: int, attempt: int, kept: Sequence[Partial]) -> None:
        """Put a prompt group for a ticket, however many attempts it takes."""
        spare: Spare | None = None
        try:
            left = await self.left_over(ticket, attempt, kept)
            if left and not left.is_part_of(ticket, attempt):
                await self.put_surplus(ticket, left)
                return
            spare = self.begin_spare(ticket, attempt + 1, left)
            await self.attempts(ticket, attempt, left, spare)
        except BaseException:
            if spare:
                await spare.abort()
            raise
        finally:
            self.free += 1
            self.left.set()

    async def attempts(self, ticket: int, attempt: int, left: Leftover | None, spare: Spare | None) -> None:
        """One after the other, until one is put; a ``spare`` is the second."""
        drafts: Sequence[Draft] = ()
        while failure := await self.attempt(self.group_of(ticket, attempt, left, drafts)):
            answer, drafts = await self.failed(ticket, attempt, failure), ()
            attempt = answer.attempt
            left = await self.left_over(ticket, attempt, answer.partials)
            if left and not left.is_part_of(ticket, attempt):
                await self.put_surplus(ticket, left)
                break
            if spare and spare.group.attempt == attempt:
                drafts, spare = await self.drawn(spare), None
        if spare and self.keeps_surplus:
            self.hand_over_later(spare)
        elif spare:
            await spare.abort()
            await self.drop(spare)

    async def attempt(self, group: PartialGroup) -> Failure | None:
        """Generate a group and put it; or why it came to nothing."""
        step, known = self.step_of(group.ticket), group.tokens()
        async with self.saving.of(group):
            with self.replica.activity("generate", step):
                answers = await self.finish(group)
            with self.replica.activity("queue", step):
                judged = await self.rollout.judge(group, answers)
        drawn = {"perf/rollout_tokens": group.tokens() - known} | generated([judged])
        self.rollout.outbox.report(step, drawn)
        if isinstance(judged, Failure):
            return judged
        with self.replica.activity("queue", step):
            reused = {group.ticket: tokens} if (tokens := group.reused()) else {}
            await self.rollout.outbox.put(judged, reused)
        return None

    def group_of(
        self, ticket: int, attempt: int, left: Leftover | None = None, drawn: Sequence[Draft] = ()
    ) -> PartialGroup:
        """What there is of an attempt."""
        prompt = self.rollout.source.prompt(ticket, attempt)
        return PartialGroup(ticket, attempt, prompt, self.config.samples_per_prompt, left, drawn)

    def step_of(self, ticket: int) -> int:
        """The step that ``ticket`` is for."""
        return ticket // self.config.prompts_per_step

    async def finish(self, group: PartialGroup, counted: bool = True) -> list[Generation | Episode | BadAnswer]:
        """The samples of ``group``, of which the engine draws what is missing."""
        async with asyncio.TaskGroup() as tasks:
            samples = [tasks.create_task(self.sample(group, k, counted)) for k in range(len(group.drafts))]
        return [sample.result() for sample in samples]

    async def sample(self, group: PartialGroup, k: int, counted: bool) -> Generation | Episode | BadAnswer:
        """One of them; asked for again while the engine fails. Repeat: it failed, which is not ``counted``."""
        while request := group.request(k, self.rollout.sampling, self.config.rollout.max_new_tokens):
            with contextlib.suppress(*([Repeat] if counted else [])):
                return await play(self.rollout.task, request, lambda asked: self.replica.once(asked, counted))
        return group.drafts[k].so_far()

    async def failed(self, ticket: int, attempt: int, failure: Failure) -> NextAttempt:
        """Count a group that is not put; the number of the next attempt, by another prompt under the same ticket."""
        self.rollout.outcomes.check_share(failure)
        if failure.reason != FILTERED:
            print(f"ticket {ticket}, attempt {attempt}: {failure.detail}", flush=True)
        answer = await asyncio.wrap_future(self.client.tickets.fail(ticket, attempt, failure.reason))
        self.rollout.outcomes.note_failures(ticket, answer.failures)
        return answer

    async def left_over(self, ticket: int, attempt: int, kept: Sequence[Partial]) -> Leftover | None:
        """What the queue has kept for a ticket: of this attempt, or a whole group of another one."""
        if not kept:
            return None
        with self.replica.activity("queue", self.step_of(ticket)):
            return (await asyncio.to_thread(kept_rows, self.client, kept)).get(ticket)

    async def put_surplus(self, ticket: int, whole: Leftover) -> None:
        """Give a ticket a whole group that the queue had left over."""
        with self.replica.activity("queue", self.step_of(ticket)):
            await self.rollout.outbox.put(whole.as_ticket(ticket), {ticket: whole.tokens})

    # -- spare groups ------------------------------------------------------------------------------------------

    def begin_spare(self, ticket: int, attempt: int, left: Leftover | None) -> Spare | None:
        """Have the next attempt at some tickets drawn too, unless as many are under way as the engine has places."""
        shape = self.config.rollout
        if left and left.whole(self.config.samples_per_prompt):
            return None
        most = shape.groups_per_request * shape.requests_in_flight
        if self.spares >= most or not has_spare(ticket, shape.over_sampling):
            return None
        self.spares += 1
        group = self.group_of(ticket, attempt)
        return Spare(group, asyncio.create_task(self.draw(group)))

    async def draw(self, group: PartialGroup) -> bool:
        """Ask the engine once: what keeps it from answering shows in the other requests."""
        try:
            with self.replica.activity("generate", self.step_of(group.ticket)):
                answers = await self.finish(group, counted=False)
            return all(isinstance(answer, Generation) and answer.finish_reason != "abort" for answer in answers)
        except* Repeat:
            pass
        finally:
            self.spares -= 1
        return False

    async def drawn(self, spare: Spare) -> Sequence[Draft]:
        """What was drawn of it, however long that takes; it is no spare any more."""
        good = await spare.drawing
        self.count(spare)
        return spare.group.drafts if good else ()

    def hand_over_later(self, spare: Spare) -> None:
        task = asyncio.create_task(self.hand_over(spare))
        self.handing_over.add(task)
        task.add_done_callback(self.handing_over.discard)

    async def hand_over(self, spare: Spare) -> None:
        """The queue gets what was not needed and is good, for another ticket."""
        group = spare.group
        try:
            if not await spare.drawing:
                await self.drop(spare)
                return
            judged = await self.rollout.judge(group, [draft.so_far() for draft in group.drafts])
            self.rollout.outbox.report(self.step_of(group.ticket), generated([judged]))
            self.count(spare)
            if isinstance(judged, Failure):
                await asyncio.wrap_future(self.client.tickets.drop_spares([group.ticket], judged.reason))
                return
            attempts = {group.ticket: group.attempt}
            await asyncio.to_thread(keep, self.client, judged, attempts, surplus=True, timeout=_KEEP_S)
        except (RelaxError, OSError) as error:
            print(f"a spare prompt group was not handed over: {error}", flush=True)
        finally:
            await spare.abort()

    async def drop(self, spare: Spare) -> None:
        """It comes to nothing."""
        self.count(spare)
        await asyncio.wrap_future(self.client.tickets.drop_spares([spare.group.ticket], _SURPLUS))

    def count(self, spare: Spare) -> None:
        """What was drawn of it is work of the engine too."""
        group = spare.group
        self.rollout.outbox.report(self.step_of(group.ticket), {"perf/rollout_tokens": group.tokens()})
