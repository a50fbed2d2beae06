"""Turns tickets into prompt groups in the queue, one request to the engine after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relax_hpc.roles.context import END
from relax_hpc.rollout.engine import EngineFault, Generation
from relax_hpc.rollout.outcomes import Failure
from relax_hpc.rollout.saving import saving
from relax_hpc.rollout.spares import Spares, has_spare
from relax_hpc.rollout.unfinished import Unfinished, Work
from relax_hpc.transfer_queue.kept_client import Leftover, keep, kept_rows
from relax_hpc.transfer_queue.records import FILTERED

if TYPE_CHECKING:
    from relax_hpc.roles.replica import Replica

_SURPLUS = "surplus"
"""Why a spare group that nobody needs is dropped."""


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
            while "tickets" in (admitted := await self.rollout.ask("admit", reader=reader, count=count)):
                work = list(zip(admitted["tickets"], admitted["attempts"], strict=True))
                for ticket, failures in admitted["failures"].items():
                    self.rollout.outcomes.check_ticket(ticket, failures, "its rows being dropped")
                replica.activity.because(admitted["waited"])
                await self.fill(*await self.put_surplus(work, admitted["kept"]))
            replica.activity.because(END)
        finally:
            if self.handing_over:
                self.handing_over.cancel()
                await asyncio.wait([self.handing_over])

    async def put_surplus(self, work: Work, kept: Sequence[Mapping[str, Any]]) -> tuple[Work, dict[int, Leftover]]:
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
                await asyncio.to_thread(self.client.generated, rows, reused)
        return [one for one in work if one[0] not in whole], found

    async def fill(self, work: Work, kept: dict[int, Leftover]) -> None:
        """Put a prompt group for each ticket, however many attempts it takes."""
        spares = await self.begin_spares(work)
        try:
            while work:
                work, kept = await self.attempt(work, kept, spares)
        except BaseException:
            await spares.abort()
            raise
        if spares.groups.work and self.keeps_surplus:
            self.handing_over = asyncio.create_task(self.hand_over(spares))

    async def attempt(self, work: Work, kept: dict[int, Leftover], spares: Spares) -> tuple[Work, dict[int, Leftover]]:
        """Generate once; what must be tried again, with the next attempt's number, and what there is of it."""
        groups, step = self.groups_of(work, kept, await spares.of(work)), self.step_of(work)
        known = groups.tokens()
        async with saving(self.client, self.config.rollout, groups):
            with self.replica.activity("generate", step):
                drawn = await self.finish(groups)
            with self.replica.activity("queue", step):
                judged = await self.rollout.judge(groups, drawn)
        failed = {ticket: group for (ticket, _), group in zip(work, judged, strict=True) if isinstance(group, Failure)}
        if not failed and not self.keeps_surplus:
            await self.drop(spares)
        rows = [row for group in judged if not isinstance(group, Failure) for row in group]
        with self.replica.activity("queue", step):
            reused = {ticket: tokens for ticket, tokens in groups.reused().items() if ticket not in failed}
            if rows:
                await asyncio.to_thread(self.client.generated, rows, reused)
        self.replica.context.report(step, {"perf/rollout_tokens": groups.tokens() - known})
        answers = {ticket: await self.failed(ticket, n, failed[ticket]) for ticket, n in work if ticket in failed}
        again = [(ticket, answer["attempt"]) for ticket, answer in answers.items()]
        return await self.put_surplus(again, [about for answer in answers.values() for about in answer["kept"]])

    def groups_of(self, work: Work, kept: dict[int, Leftover], drawn: dict[int, Any]) -> Unfinished:
        """What there is of the groups of ``work``."""
        prompts = [self.rollout.source.prompt(ticket, attempt) for ticket, attempt in work]
        return Unfinished(work, prompts, self.config.samples_per_group, kept, drawn)

    def step_of(self, work: Work) -> int:
        """The step that the first ticket of ``work`` is for."""
        return work[0][0] // self.config.groups_per_step

    async def finish(self, groups: Unfinished) -> list[Generation | EngineFault]:
        """The samples of ``groups``, of which the engine draws what is missing."""
        while requests := groups.requests():
            with contextlib.suppress(Repeat):
                return groups.complete(requests, await self.replica.once(requests, self.rollout.sampling))
        return groups.complete([], [])

    async def failed(self, ticket: int, attempt: int, failure: Failure) -> dict[str, Any]:
        """Count a group that is not put; the number of the next attempt, by another prompt under the same ticket."""
        self.rollout.outcomes.check_share(failure)
        if failure.reason != FILTERED:
            print(f"ticket {ticket}, attempt {attempt}: {failure.detail}", flush=True)
        answer = await self.rollout.ask("fail", ticket=ticket, attempt=attempt, reason=failure.reason)
        self.rollout.outcomes.check_ticket(ticket, answer["failures"], failure.detail)
        return answer

    # -- spare groups ------------------------------------------------------------------------------------------

    async def begin_spares(self, work: Work) -> Spares:
        """Have the next attempts at some of the tickets drawn too, unless the last ones are not even finished."""
        share, late = self.config.rollout.over_sampling, self.handing_over and not self.handing_over.done()
        if self.handing_over and not late:
            self.handing_over.result()
        chosen = [(ticket, attempt + 1) for ticket, attempt in work if not late and has_spare(ticket, share)]
        groups = self.groups_of(chosen, {}, {})
        return Spares(groups, asyncio.create_task(self.draw(groups)) if chosen else None)

    async def draw(self, groups: Unfinished) -> None:
        """Ask the engine once: what keeps it from answering shows in the other requests."""
        with self.replica.activity("generate", self.step_of(groups.work)), contextlib.suppress(Repeat):
            await self.replica.once(groups.requests(), self.rollout.sampling, counted=False)

    async def hand_over(self, spares: Spares) -> None:
        """The queue gets what was not needed and is good, for another ticket."""
        await spares.drawn()
        whole = spares.whole()
        groups = self.groups_of(whole, {}, {ticket: spares.groups.of(ticket) for ticket, _ in whole})
        judged = await self.rollout.judge(groups, groups.complete([], []))
        good = [row for group in judged if not isinstance(group, Failure) for row in group]
        if good:
            await asyncio.to_thread(keep, self.client, good, dict(whole), surplus=True)
        for (ticket, _), group in zip(whole, judged, strict=True):
            if isinstance(group, Failure):
                await self.rollout.ask("spared", tickets=[ticket], reason=group.reason)
            del spares.left[ticket]
        await self.drop(spares)

    async def drop(self, spares: Spares) -> None:
        """Those that are left come to nothing; the engine is done with them when this returns."""
        await spares.abort()
        if work := spares.groups.work:
            self.replica.context.report(self.step_of(work), {"perf/rollout_tokens": spares.groups.tokens()})
        if spares.left:
            await self.rollout.ask("spared", tickets=list(spares.left), reason=_SURPLUS)
            spares.left.clear()
