"""Turns tickets into prompt groups in the queue, one request to the engine after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from relax_hpc.engines.engine import Draft, EngineFault, Generation
from relax_hpc.errors import RelaxError
from relax_hpc.roles.context import END
from relax_hpc.rollout.outcomes import Failure, generated
from relax_hpc.rollout.saving import saving
from relax_hpc.rollout.spares import Spare, abort, has_spare
from relax_hpc.rollout.unfinished import Unfinished, Work
from relax_hpc.transfer_queue.client import NextAttempt, Partial
from relax_hpc.transfer_queue.client.partials import Leftover, keep, kept_rows
from relax_hpc.transfer_queue.records import FILTERED

if TYPE_CHECKING:
    from relax_hpc.roles.replica import Replica

Spares = dict[tuple[int, int], Spare]
"""By (ticket, attempt)."""
_SURPLUS = "surplus"
"""Why a spare group that nobody needs is dropped."""
_KEEP_S = 10.0
"""For the queue to take spare groups, which are no loss."""


class Repeat(Exception):
    """An engine failed to answer, which is counted; it is to be asked again."""


class TicketWorker:
    """A replica has several of them, so that its engine is never without work."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.rollout = replica, replica.rollout
        self.config, self.client = replica.config, replica.rollout.client
        self.keeps_surplus = self.config.max_staleness > 0
        """For tickets to come; if not, nobody may be trained on them any more."""
        self.handing_over: asyncio.Task[None] | None = None
        """Of the last spares that nobody needed."""

    async def serve(self) -> None:
        """Take tickets and turn them into rows, until there are no more."""
        count, reader, replica = self.config.rollout.groups_per_request, self.replica.reader.reader, self.replica
        try:
            while admitted := await asyncio.wrap_future(self.client.tickets.admit(reader, count)):
                work = list(zip(admitted.tickets, admitted.attempts, strict=True))
                for ticket, failures in admitted.failures.items():
                    self.rollout.outcomes.count_lost(ticket, failures, "rows that were dropped after they were put")
                replica.activity.because(admitted.waited)
                await self.fill(*await self.put_surplus(work, admitted.partials))
            replica.activity.because(END)
        finally:
            if self.handing_over:
                self.handing_over.cancel()
                await asyncio.gather(self.handing_over, return_exceptions=True)

    async def put_surplus(self, work: Work, kept: Sequence[Partial]) -> tuple[Work, dict[int, Leftover]]:
        """Give tickets the whole groups that the queue had left over.

        Returns the tickets that are still to be generated, and what is ``kept`` of them.
        """
        if not kept:
            return work, {}
        with self.replica.activity("queue", self.step_of(work)):
            found = await asyncio.to_thread(kept_rows, self.client, kept)
            attempts = dict(work)
            whole = {t: group for t, group in found.items() if not group.is_part_of(t, attempts[t])}
            if whole:
                rows = [row for ticket, group in whole.items() for row in group.as_ticket(ticket)]
                reused = {ticket: group.tokens for ticket, group in whole.items()}
                await self.rollout.put(rows, reused)
        return [one for one in work if one[0] not in whole], found

    async def fill(self, work: Work, kept: dict[int, Leftover]) -> None:
        """Put a prompt group for each ticket, however many attempts it takes."""
        spares = self.begin_spares(work, kept)
        try:
            while work:
                work, kept = await self.attempt(work, kept, spares)
        except BaseException:
            await abort(spares.values())
            raise
        if spares:
            self.handing_over = asyncio.create_task(self.hand_over(spares))

    async def attempt(self, work: Work, kept: dict[int, Leftover], spares: Spares) -> tuple[Work, dict[int, Leftover]]:
        """Generate once; what must be tried again, with the next attempt's number, and what there is of it."""
        groups, step = self.groups_of(work, kept, await self.drawn(work, spares)), self.step_of(work)
        known = groups.tokens()
        async with saving(self.client, self.config.rollout, groups):
            with self.replica.activity("generate", step):
                answers = await self.finish(groups)
            with self.replica.activity("queue", step):
                judged = dict(zip(work, await self.rollout.judge(groups, answers), strict=True))
            good = [one for one, group in judged.items() if not isinstance(group, Failure)]
            unneeded = [] if self.keeps_surplus else taken(spares, ((ticket, attempt + 1) for ticket, attempt in good))
            await abort(unneeded)
        with self.replica.activity("queue", step):
            rows = [row for one in good for row in judged[one]]
            reused = groups.reused()
            if rows:
                here = {ticket: reused[ticket] for ticket, _ in good if ticket in reused}
                await self.rollout.put(rows, here)
        drawn = {"perf/rollout_tokens": groups.tokens() - known}
        self.replica.context.report(step, drawn | generated(judged.values()))
        await self.drop(unneeded)
        answered = {one[0]: await self.failed(*one, group) for one, group in judged.items() if one not in good}
        again = [(ticket, answer.attempt) for ticket, answer in answered.items()]
        return await self.put_surplus(again, [about for answer in answered.values() for about in answer.partials])

    def groups_of(self, work: Work, kept: dict[int, Leftover], drawn: dict[int, list[Draft]]) -> Unfinished:
        """What there is of the groups of ``work``."""
        prompts = [self.rollout.source.prompt(ticket, attempt) for ticket, attempt in work]
        return Unfinished(work, prompts, self.config.samples_per_prompt, kept, drawn)

    def step_of(self, work: Work) -> int:
        """The step that the first ticket of ``work`` is for."""
        return work[0][0] // self.config.prompts_per_step

    async def finish(self, groups: Unfinished) -> list[Generation | EngineFault]:
        """The samples of ``groups``, of which the engine draws what is missing."""
        while requests := groups.requests():
            with contextlib.suppress(Repeat):
                return groups.complete(requests, await self.replica.once(requests, self.rollout.sampling))
        return groups.complete([], [])

    async def failed(self, ticket: int, attempt: int, failure: Failure) -> NextAttempt:
        """Count a group that is not put; the number of the next attempt, by another prompt under the same ticket."""
        self.rollout.outcomes.check_share(failure)
        if failure.reason != FILTERED:
            print(f"ticket {ticket}, attempt {attempt}: {failure.detail}", flush=True)
        answer = await asyncio.wrap_future(self.client.tickets.fail(ticket, attempt, failure.reason))
        self.rollout.outcomes.note_failures(ticket, answer.failures)
        return answer

    # -- spare groups ------------------------------------------------------------------------------------------

    def begin_spares(self, work: Work, kept: dict[int, Leftover]) -> Spares:
        """Have the next attempts at some of the tickets drawn too, unless the last ones are not even finished."""
        if self.handing_over:
            if not self.handing_over.done():
                return {}
            self.handing_over.result()
        share, size = self.config.rollout.over_sampling, self.config.samples_per_prompt
        drawn = [one for one in work if not (one[0] in kept and kept[one[0]].whole(size))]
        chosen = [(ticket, attempt + 1) for ticket, attempt in drawn if has_spare(ticket, share)]
        groups = {one: self.groups_of([one], {}, {}) for one in chosen}
        return {one: Spare(group, asyncio.create_task(self.draw(group))) for one, group in groups.items()}

    async def draw(self, group: Unfinished) -> bool:
        """Ask the engine once: what keeps it from answering shows in the other requests."""
        with self.replica.activity("generate", self.step_of(group.work)), contextlib.suppress(Repeat):
            answers = await self.replica.once(group.requests(), self.rollout.sampling, counted=False)
            return all(isinstance(answer, Generation) and answer.finish_reason != "abort" for answer in answers)
        return False

    async def drawn(self, work: Work, spares: Spares) -> dict[int, list[Draft]]:
        """By ticket, what was drawn of these very attempts, however long it takes; they are no spares any more."""
        found = {}
        for one in work:
            for spare in taken(spares, [one]):
                if await spare.drawing:
                    found[one[0]] = spare.group.drafts
                self.count([spare])
        return found

    async def hand_over(self, spares: Spares) -> None:
        """The queue gets what was not needed and is good, for another ticket."""
        try:
            whole = {one: spare.group.drafts for one, spare in spares.items() if await spare.drawing}
            groups = self.groups_of(list(whole), {}, {ticket: drafts for (ticket, _), drafts in whole.items()})
            judged = dict(zip(whole, await self.rollout.judge(groups, groups.complete([], [])), strict=True))
            if judged:
                self.replica.context.report(self.step_of(list(judged)), generated(judged.values()))
            good = {one: group for one, group in judged.items() if not isinstance(group, Failure)}
            rows = [row for group in good.values() for row in group]
            if rows:
                await asyncio.to_thread(keep, self.client, rows, dict(good.keys()), surplus=True, timeout=_KEEP_S)
            for (ticket, _), group in judged.items():
                if isinstance(group, Failure):
                    await asyncio.wrap_future(self.client.tickets.drop_spares([ticket], group.reason))
            self.count([spares[one] for one in judged])
            await self.drop([spare for one, spare in spares.items() if one not in judged])
        except (RelaxError, OSError) as error:
            print(f"{len(spares)} spare prompt groups were not handed over: {error}", flush=True)
        finally:
            await abort(spares.values())

    async def drop(self, spares: Sequence[Spare]) -> None:
        """They come to nothing."""
        self.count(spares)
        if spares:
            tickets = [spare.group.work[0][0] for spare in spares]
            await asyncio.wrap_future(self.client.tickets.drop_spares(tickets, _SURPLUS))

    def count(self, spares: Sequence[Spare]) -> None:
        """What was drawn of them is work of the engine too."""
        for spare in spares:
            self.replica.context.report(self.step_of(spare.group.work), {"perf/rollout_tokens": spare.group.tokens()})


def taken(spares: Spares, attempts: Iterable[tuple[int, int]]) -> list[Spare]:
    """Those of these attempts, which are in ``spares`` no more."""
    return [spares.pop(one) for one in list(attempts) if one in spares]
