"""Worker that turns tickets into prompt groups in the queue: as many at a time as an engine may
have."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client import Admission, AttemptLog, NextAttempt
from relax_hpc.queue.process_context import END
from relax_hpc.queue.records import FILTERED
from relax_hpc.rollout.attempt import Attempt, Made
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    BatchedEngine,
    Episode,
    GenerateRequest,
    Generation,
)
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.play import Repeat, play
from relax_hpc.rollout.episodes.turns import Start
from relax_hpc.rollout.media import UNUSABLE
from relax_hpc.rollout.outcomes import Failure, generated
from relax_hpc.rollout.segment_log import SegmentLog
from relax_hpc.rollout.spares import Spare, has_spare

if TYPE_CHECKING:
    from relax_hpc.rollout.replica import Replica

_UNUSABLE, _SURPLUS = "unusable", "surplus"
"""Reasons why an attempt is dropped: nobody can go on with its log, or it is a spare that nobody
needs."""


class HandedOn(Exception):
    """The engine leaves: what it has of an attempt is in the log, for whoever is admitted to the
    ticket next."""


class TicketWorker:
    """Asks for as many tickets as its engine has places for, and works on each of them by
    itself."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.rollout = replica, replica.rollout
        self.config, self.client = replica.config, replica.rollout.client
        shape = self.config.rollout
        self.free = shape.groups_per_request * shape.requests_in_flight
        """Prompt groups that the engine could work on beside those that it has."""
        self.left = asyncio.Event()
        """Event that is set when a prompt group has been put."""
        self.log = SegmentLog(self.client, shape)
        self.spares = 0
        """Spares being drawn, needed or not."""
        self.unneeded: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Take tickets and turn them into rows, until there are no more or the engine leaves."""
        try:
            async with self.log.running(), asyncio.TaskGroup() as tasks:
                while admitted := await self.admitted():
                    self.replica.activity.because(admitted.waited)
                    for ticket, failures in admitted.failures.items():
                        self.rollout.outcomes.count_lost(
                            ticket, failures, "rows that were dropped after they were put"
                        )
                    wanted = list(zip(admitted.tickets, admitted.attempts, strict=True))
                    begun = [(place.ticket, place.attempt) for place in admitted.logs]
                    await asyncio.to_thread(self.rollout.source.fetch, [*wanted, *begun])
                    for ticket, number in wanted:
                        self.free -= 1
                        tasks.create_task(self.fill(ticket, number, admitted.logs))
                    if self.rollout.media.looks_ahead:
                        tasks.create_task(self.look_ahead(max(admitted.tickets)))
            self.replica.activity.because(END)
        finally:
            for task in self.unneeded:
                task.cancel()
            await asyncio.gather(*self.unneeded, return_exceptions=True)

    async def look_ahead(self, ticket: int) -> None:
        """Have media decoded of prompts behind that of ``ticket``, as many as an engine may
        have."""
        shape = self.config.rollout
        count = shape.groups_per_request * shape.requests_in_flight
        self.rollout.media.expect(
            await asyncio.to_thread(self.rollout.source.following, ticket, count)
        )

    async def admitted(self) -> Admission | None:
        """The next tickets, once there is room for one; None: there will be none."""
        while self.free <= 0:
            self.left.clear()
            await self.left.wait()
        asking = self.client.tickets.admit(self.replica.reader.reader, self.free)
        return await self.replica.unless_leaving(asyncio.wrap_future(asking))

    async def fill(self, ticket: int, number: int, logs: Sequence[AttemptLog]) -> None:
        """Put a prompt group for a ticket, however many attempts it takes."""
        spare: Spare | None = None
        try:
            attempt = await self.gone_on(ticket, number, logs)
            spare = self.begin_spare(attempt)
            while failure := await self.finish(attempt):
                answer = await self.failed(attempt, failure)
                attempt = await self.gone_on(ticket, answer.attempt, answer.logs)
                if spare and spare.attempt.number == answer.attempt and not answer.logs:
                    attempt, spare = spare.attempt if await spare.drawing else attempt, None
            if spare:
                await self.leave(spare)
        except HandedOn:
            if spare:
                await spare.abort()
                await self.drop(spare.attempt, _SURPLUS)
            await asyncio.wrap_future(self.client.tickets.return_ticket(ticket))
        except BaseException:
            if spare:
                await spare.abort()
            raise
        finally:
            self.free += 1
            self.left.set()

    async def gone_on(self, ticket: int, number: int, logs: Sequence[AttemptLog]) -> Attempt:
        """An attempt with what its log has, or that of a spare, among ``logs``; or one that
        begins."""
        place = next((place for place in logs if place.holder == ticket), None)
        if not place:
            return self.begun(ticket, number)
        prompt = self.rollout.source.prompt(place.ticket, place.attempt)
        with self.replica.activity("queue", self.step_of(ticket)):
            if made := await self.log.read(place, prompt):
                return self.attempt(ticket, number, prompt, made)
            begun = self.begun(ticket, number)
            await self.drop(begun, _UNUSABLE)
        return begun

    def begun(self, ticket: int, number: int) -> Attempt:
        """New attempt, of which there is nothing yet."""
        return self.attempt(ticket, number, self.rollout.source.prompt(ticket, number))

    def attempt(
        self, ticket: int, number: int, prompt: Prompt, made: Mapping[int, Made] | None = None
    ) -> Attempt:
        """Attempt ``number`` at ``ticket``, with what there is of it."""
        in_turns = self.rollout.player is not None
        return Attempt(ticket, number, prompt, self.config.samples_per_prompt, made, in_turns)

    async def finish(self, attempt: Attempt) -> Failure | None:
        """Draw what is missing of an attempt and put it; or why it came to nothing. HandedOn:
        others are to do that."""
        step, known = self.step_of(attempt.ticket), attempt.tokens
        if failure := await self.prepare(attempt):
            self.rollout.outcomes.count(failure)
            return failure
        async with self.log.of(attempt):
            with self.drawing(attempt.ticket):
                drawing = await self.replica.until_leaving(self.draw(attempt))
            if drawing.cancelled():
                self.report(attempt.ticket, attempt.tokens - known)
                await self.log.keep(attempt)
                raise HandedOn
            answers = drawing.result()
            with self.replica.activity("queue", step):
                judged = await self.rollout.judge(attempt, answers)
        self.report(attempt.ticket, attempt.tokens - known, generated([judged]))
        if isinstance(judged, Failure):
            return judged
        with self.replica.activity("queue", step):
            await self.rollout.outbox.put(judged)
        return None

    async def prepare(self, attempt: Attempt) -> Failure | None:
        """Have the media of its prompt where engines read them, or say why they are of no use."""
        if not (attempt.prompt.media or attempt.prompt.fault):
            return None
        try:
            with self.replica.activity("queue", self.step_of(attempt.ticket)):
                attempt.prompt = await self.rollout.media.of_ticket(attempt.prompt, attempt.ticket)
        except UNUSABLE as bad:
            return Failure(bad.reason, f"{bad} (prompt {attempt.prompt.prompt_id})")
        return None

    def report(self, ticket: int, drawn: int, values: Mapping[str, float] | None = None) -> None:
        """Report the number of tokens drawn for a ticket, and what else there is to count."""
        read, self.replica.read = self.replica.read, Counter()
        self.rollout.outbox.report(
            self.step_of(ticket), {"perf/rollout_tokens": drawn, **read, **(values or {})}
        )

    def step_of(self, ticket: int) -> int:
        """The step that ``ticket`` is for."""
        return ticket // self.config.prompts_per_step

    async def draw(
        self, attempt: Attempt, counted: bool = True
    ) -> list[Generation | Episode | BadAnswer]:
        """The episodes of ``attempt``, of which the engine draws what is missing. Repeat: see
        `episode`."""
        engine = self.replica.engine
        if isinstance(engine, BatchedEngine) and not (
            self.rollout.player or self.rollout.task.makes("episode")
        ):
            return await self.together(attempt, counted)
        async with asyncio.TaskGroup() as tasks:
            episodes = [
                tasks.create_task(self.episode(attempt, k, counted))
                for k in range(len(attempt.drafts))
            ]
        return [episode.result() for episode in episodes]

    async def together(
        self, attempt: Attempt, counted: bool
    ) -> list[Generation | Episode | BadAnswer]:
        """The same, where an episode is one response, of an engine that `BatchedEngine`."""
        bad: dict[int, BadAnswer] = {}
        budget = self.config.rollout.max_new_tokens
        while requests := attempt.requests(self.rollout.sampling, budget, but=bad):
            with contextlib.suppress(*([Repeat] if counted else [])):
                answers = await self.replica.asked(
                    lambda engine, these=requests: engine.generate_all(these), counted
                )
                for request, answer in zip(requests, answers, strict=True):
                    if isinstance(answer, BadAnswer):
                        bad[request.sample] = answer
                    else:
                        attempt.drafts[request.sample].ended = answer
        return [bad.get(k) or draft.snapshot() for k, draft in enumerate(attempt.drafts)]

    async def episode(
        self, attempt: Attempt, k: int, counted: bool
    ) -> Generation | Episode | BadAnswer:
        """One of them; asked for again while the engine fails. Repeat: it failed, which is not
        ``counted``."""
        while request := attempt.request(
            k, self.rollout.sampling, self.config.rollout.max_new_tokens
        ):
            history = attempt.drafts[k]
            if isinstance(history, History):
                return await self.turns(attempt, history, request, counted)
            with contextlib.suppress(*([Repeat] if counted else [])):
                limit_s = self.config.rollout.episode_timeout_s
                return await play(
                    self.rollout.task,
                    request,
                    lambda asked: self.replica.once(asked, counted),
                    limit_s,
                )
        return attempt.drafts[k].snapshot()

    async def turns(
        self, attempt: Attempt, history: History, request: GenerateRequest, counted: bool
    ) -> Episode | BadAnswer:
        """The episode that ``history`` is the beginning of, against its environment. Repeat: as
        `episode`."""
        assert self.rollout.player

        async def ask(asked: GenerateRequest) -> Generation | BadAnswer:
            with self.replica.activity("generate", self.step_of(attempt.ticket)):
                return await self.replica.once(asked, counted)

        with self.replica.activity.playing():
            start = Start(attempt.prompt, request, ask, attempt.ticket, counted)
            episode = await self.rollout.player.play(history, start)
        self.rollout.report_program(episode)
        return episode

    def drawing(self, ticket: int) -> AbstractContextManager[None]:
        """Activity of the engine while it draws all of an attempt; of episodes of several turns,
        each turn by itself is."""
        return (
            nullcontext()
            if self.rollout.player
            else self.replica.activity("generate", self.step_of(ticket))
        )

    async def failed(self, attempt: Attempt, failure: Failure) -> NextAttempt:
        """Count a group that is not put; the number of the next attempt, by another prompt under
        the same ticket."""
        if failure.reason != FILTERED:
            text = (
                f"ticket {attempt.ticket}, attempt {attempt.number}: {failure.detail_with_location}"
            )
            print(log_entry(text), flush=True)
            self.rollout.report_failure(failure.reason, failure.detail, failure.origin)
        if self.rollout.outcomes.is_programming_error(failure):
            await self.check_progress(failure)
        self.rollout.outcomes.check_share(failure)
        asking = self.client.tickets.fail(attempt.ticket, attempt.number, failure.reason)
        answer = await asyncio.wrap_future(asking)
        self.rollout.outcomes.note_failures(attempt.ticket, answer.failures)
        return answer

    async def check_progress(self, failure: Failure) -> None:
        """ConfigError if the run has made no progress: then a programming error is the cause of
        ``failure``, and not data."""
        status = await asyncio.wrap_future(self.client.status.get())
        if not (status.trained_steps or status.accepted):
            raise ConfigError(failure.as_programming_error)

    # -- spares ------------------------------------------------------------------------------------

    def begin_spare(self, attempt: Attempt) -> Spare | None:
        """Have the attempt behind some drawn too, unless as many are under way as the engine has
        places."""
        shape = self.config.rollout
        most = shape.groups_per_request * shape.requests_in_flight
        if (
            attempt.whole
            or self.spares >= most
            or not has_spare(attempt.ticket, shape.over_sampling)
        ):
            return None
        self.spares += 1
        following = self.begun(attempt.ticket, attempt.number + 1)
        return Spare(following, asyncio.create_task(self.draw_spare(following)))

    async def draw_spare(self, attempt: Attempt) -> bool:
        """Whether the engine draws all of it well, asked once: what keeps it from that shows in the
        other requests."""
        try:
            if await self.prepare(attempt):
                return False
            with self.drawing(attempt.ticket):
                answers = await self.draw(attempt, counted=False)
            return not any(
                isinstance(answer, BadAnswer) or answer.finish_reason == "abort"
                for answer in answers
            )
        except* Repeat:
            pass
        finally:
            self.spares -= 1
            # It is work of the engine too.
            self.report(attempt.ticket, attempt.tokens)
        return False

    async def leave(self, spare: Spare) -> None:
        """Offer a spare to other tickets, as its own does not need it; at staleness 0, where none
        may be given it, drop it."""
        if not self.config.max_staleness:
            await spare.abort()
            await self.drop(spare.attempt, _SURPLUS)
            return
        task = asyncio.create_task(self.keep(spare))
        self.unneeded.add(task)
        task.add_done_callback(self.unneeded.discard)

    async def keep(self, spare: Spare) -> None:
        """Have the queue keep a spare, if it is good."""
        try:
            if await spare.drawing:
                await self.log.spare(spare.attempt)
            else:
                await self.drop(spare.attempt, _SURPLUS)
        except RelaxError as error:
            print(log_entry(f"a spare prompt group was not dropped: {error}"), flush=True)
        finally:
            await spare.abort()

    async def drop(self, attempt: Attempt, reason: str) -> None:
        """Drop an attempt that is of no use, which the queue counts."""
        await asyncio.wrap_future(
            self.client.tickets.drop_attempt(attempt.ticket, attempt.number, reason)
        )
