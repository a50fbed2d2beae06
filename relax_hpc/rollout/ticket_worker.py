"""Worker that generates prompt groups for tickets, as many concurrently as its engine may have."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.data.generation import Episode, GenerateRequest, Generation
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client import Admission, AttemptLog, NextAttempt
from relax_hpc.queue.process_context import END
from relax_hpc.queue.records import FILTERED
from relax_hpc.rollout.attempt import Attempt, EpisodeResult
from relax_hpc.rollout.engines.engine import BadAnswer, BatchedEngine, Engine
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.play import EngineRetry, play
from relax_hpc.rollout.episodes.turns import EpisodeStart
from relax_hpc.rollout.media import UNUSABLE
from relax_hpc.rollout.outcomes import Failure, count_generated_lengths, generated_metrics
from relax_hpc.rollout.segment_log import SegmentLog
from relax_hpc.rollout.spares import Spare, has_spare

if TYPE_CHECKING:
    from relax_hpc.rollout.replica import Replica

_UNUSABLE_LOG, _SURPLUS = "unusable", "surplus"
"""Reasons for which an attempt is dropped: its log cannot be used, or it is a spare that no ticket
needs."""


class EngineLeaving(Exception):
    """Signal that the engine leaves. The log has the attempt, for the next owner of the ticket."""


class TicketWorker:
    """Asks for as many tickets as its engine has free slots, and works on each in a task."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.rollout = replica, replica.rollout
        self.config, self.client = replica.config, replica.rollout.client
        rollout = self.config.rollout
        self.slots = rollout.groups_per_request * rollout.requests_in_flight
        """Prompt groups that the engine may work on concurrently."""
        self.free = self.slots
        """Slots that are free."""
        self.slot_freed = asyncio.Event()
        """Event that is set when a slot becomes free."""
        self.log = SegmentLog(self.client, rollout)
        self.spares = 0
        """Spares that are being generated."""
        self.unneeded: set[asyncio.Task[None]] = set()
        """Tasks that store spares which their own tickets do not need."""

    async def serve(self) -> None:
        """Take tickets and put their rows, until there are no more or the engine leaves."""
        try:
            async with self.log.running(), asyncio.TaskGroup() as tasks:
                while admission := await self.await_tickets():
                    await self.start_tickets(admission, tasks)
            self.replica.activity.set_wait_causes(END)
        finally:
            for task in self.unneeded:
                task.cancel()
            await asyncio.gather(*self.unneeded, return_exceptions=True)

    async def start_tickets(self, admission: Admission, tasks: asyncio.TaskGroup) -> None:
        """Start to work on admitted tickets."""
        self.replica.activity.set_wait_causes(admission.waited)
        for ticket, failures in admission.failures.items():
            self.rollout.outcomes.count_lost(
                ticket, failures, "rows that were dropped after they were put"
            )
        attempts = list(zip(admission.tickets, admission.attempts, strict=True))
        logged = [(log.ticket, log.attempt) for log in admission.logs]
        await asyncio.to_thread(self.rollout.source.fetch, [*attempts, *logged])
        if admission.tickets:
            newest_step = self.step_of(max(admission.tickets))
            await self.replica.profile.reach(newest_step, self.replica.engine)
        for ticket, number in attempts:
            self.free -= 1
            tasks.create_task(self.work_on_ticket(ticket, number, admission.logs))
        if self.rollout.media.looks_ahead:
            tasks.create_task(self.expect_media(max(admission.tickets)))

    async def expect_media(self, ticket: int) -> None:
        """Start to decode the media of the prompts after that of ``ticket``, as many as the engine
        has slots."""
        prompts = await asyncio.to_thread(self.rollout.source.following, ticket, self.slots)
        self.rollout.media.expect(prompts)

    async def await_tickets(self) -> Admission | None:
        """The next tickets, once a slot is free; None: there are no more."""
        while self.free <= 0:
            self.slot_freed.clear()
            await self.slot_freed.wait()
        asking = self.client.tickets.admit(self.replica.reader.reader, self.free)
        return await self.replica.unless_leaving(asyncio.wrap_future(asking))

    async def work_on_ticket(self, ticket: int, number: int, logs: Sequence[AttemptLog]) -> None:
        """Put a prompt group for a ticket, after as many attempts as it takes."""
        spare: Spare | None = None
        try:
            attempt = await self.resume_attempt(ticket, number, logs)
            spare = self.begin_spare(attempt)
            while failure := await self.finish_attempt(attempt):
                answer = await self.report_failed_attempt(attempt, failure)
                attempt = await self.resume_attempt(ticket, answer.attempt, answer.logs)
                if spare and spare.attempt.number == answer.attempt and not answer.logs:
                    if await spare.generating:
                        attempt = spare.attempt
                    spare = None
            if spare:
                await self.offer_spare(spare)
        except EngineLeaving:
            if spare:
                await spare.abort()
                await self.drop_attempt(spare.attempt, _SURPLUS)
            await asyncio.wrap_future(self.client.tickets.return_ticket(ticket))
        except BaseException:
            if spare:
                await spare.abort()
            raise
        finally:
            self.free += 1
            self.slot_freed.set()

    async def resume_attempt(self, ticket: int, number: int, logs: Sequence[AttemptLog]) -> Attempt:
        """Attempt ``number`` at ``ticket`` with the results in its log or in the log of a spare,
        which is among ``logs``; a new attempt if there is no usable log."""
        log = next((log for log in logs if log.holder == ticket), None)
        if not log:
            return self.new_attempt(ticket, number)
        prompt = self.rollout.source.prompt(log.ticket, log.attempt)
        with self.replica.activity("queue", self.step_of(ticket)):
            logged = await self.log.read(log, prompt)
            if logged:
                return self.make_attempt(ticket, number, prompt, logged)
            attempt = self.new_attempt(ticket, number)
            await self.drop_attempt(attempt, _UNUSABLE_LOG)
        return attempt

    def new_attempt(self, ticket: int, number: int) -> Attempt:
        """Attempt without any response yet."""
        return self.make_attempt(ticket, number, self.rollout.source.prompt(ticket, number))

    def make_attempt(
        self,
        ticket: int,
        number: int,
        prompt: Prompt,
        logged: Mapping[int, EpisodeResult] | None = None,
    ) -> Attempt:
        """Attempt ``number`` at ``ticket`` with its ``logged`` results."""
        in_turns = self.rollout.player is not None
        return Attempt(ticket, number, prompt, self.config.samples_per_prompt, logged, in_turns)

    async def finish_attempt(self, attempt: Attempt) -> Failure | None:
        """Generate the missing parts of an attempt and put its rows, or return the reason why it
        failed. EngineLeaving: the engine leaves."""
        step, tokens_before = self.step_of(attempt.ticket), attempt.tokens
        failure = await self.prepare_media(attempt)
        if failure:
            self.rollout.outcomes.count(failure)
            return failure
        async with self.log.recording(attempt):
            with self.generating(attempt.ticket):
                generating = await self.replica.until_leaving(self.generate(attempt))
            if generating.cancelled():
                self.report(attempt.ticket, attempt.tokens - tokens_before)
                await self.log.hand_over(attempt)
                raise EngineLeaving
            answers = generating.result()
            with self.replica.activity("queue", step):
                rows = await self.rollout.make_rows(attempt, answers)
        lengths = count_generated_lengths(answers, self.config.rollout.max_new_tokens)
        tokens = attempt.tokens - tokens_before
        self.report(attempt.ticket, tokens, generated_metrics([rows]) | lengths)
        if isinstance(rows, Failure):
            return rows
        with self.replica.activity("queue", step):
            await self.rollout.outbox.put(rows)
        return None

    async def prepare_media(self, attempt: Attempt) -> Failure | None:
        """Store the media of the prompt for engines, or return the reason why they cannot be
        used."""
        if not (attempt.prompt.media or attempt.prompt.media_error):
            return None
        try:
            with self.replica.activity("queue", self.step_of(attempt.ticket)):
                attempt.prompt = await self.rollout.media.store_prompt_for_ticket(
                    attempt.prompt, attempt.ticket
                )
        except UNUSABLE as bad:
            return Failure(bad.reason, f"{bad} (prompt {attempt.prompt.prompt_id})")
        return None

    def report(self, ticket: int, tokens: int, values: Mapping[str, float] | None = None) -> None:
        """Report the number of ``tokens`` that were sampled for a ticket, and further metrics."""
        read, self.replica.read = self.replica.read, Counter()
        self.rollout.outbox.report(
            self.step_of(ticket), {"perf/rollout_tokens": tokens, **read, **(values or {})}
        )

    def step_of(self, ticket: int) -> int:
        """The step that ``ticket`` is for."""
        return ticket // self.config.prompts_per_step

    async def generate(
        self, attempt: Attempt, retries_engine: bool = True
    ) -> list[Generation | Episode | BadAnswer]:
        """The episodes of ``attempt``; the engine generates their missing parts. EngineRetry: see
        `generate_episode`."""
        engine = self.replica.engine
        is_one_response = not (self.rollout.player or self.rollout.task.makes("episode"))
        if isinstance(engine, BatchedEngine) and is_one_response:
            return await self.generate_batched(attempt, retries_engine)
        async with asyncio.TaskGroup() as tasks:
            episodes = [
                tasks.create_task(self.generate_episode(attempt, k, retries_engine))
                for k in range(len(attempt.drafts))
            ]
        return [episode.result() for episode in episodes]

    async def generate_batched(
        self, attempt: Attempt, retries_engine: bool
    ) -> list[Generation | Episode | BadAnswer]:
        """Generate all episodes of ``attempt`` in one call of a `BatchedEngine`. Each episode is
        one response."""
        bad: dict[int, BadAnswer] = {}
        budget = self.config.rollout.max_new_tokens
        while requests := attempt.requests(self.rollout.sampling, budget, except_episodes=bad):
            with contextlib.suppress(*([EngineRetry] if retries_engine else [])):
                answers = await self.replica.ask_engine(_batched(requests), retries_engine)
                for request, answer in zip(requests, answers, strict=True):
                    if isinstance(answer, BadAnswer):
                        bad[request.sample] = answer
                    else:
                        attempt.drafts[request.sample].ended = answer
        return [bad.get(k) or draft.snapshot() for k, draft in enumerate(attempt.drafts)]

    async def generate_episode(
        self, attempt: Attempt, k: int, retries_engine: bool
    ) -> Generation | Episode | BadAnswer:
        """Episode ``k`` of ``attempt``. If the engine fails and ``retries_engine`` is set, the
        failure is counted and the engine is asked again. EngineRetry: the engine has failed, and
        ``retries_engine`` is not set."""
        budget = self.config.rollout.max_new_tokens
        while request := attempt.request(k, self.rollout.sampling, budget):
            history = attempt.drafts[k]
            if isinstance(history, History):
                return await self.play_turns(attempt, history, request, retries_engine)
            with contextlib.suppress(*([EngineRetry] if retries_engine else [])):
                return await play(
                    self.rollout.task,
                    request,
                    lambda request: self.replica.ask_once(request, retries_engine),
                    self.config.rollout.episode_timeout_s,
                )
        return attempt.drafts[k].snapshot()

    async def play_turns(
        self, attempt: Attempt, history: History, request: GenerateRequest, retries_engine: bool
    ) -> Episode | BadAnswer:
        """The episode against its environment that begins with ``history``. EngineRetry: as
        `generate_episode`."""
        assert self.rollout.player

        async def ask(request: GenerateRequest) -> Generation | BadAnswer:
            with self.replica.activity("generate", self.step_of(attempt.ticket)):
                return await self.replica.ask_once(request, retries_engine)

        with self.replica.activity.playing():
            start = EpisodeStart(attempt.prompt, request, ask, attempt.ticket, retries_engine)
            episode = await self.rollout.player.play(history, start)
        self.rollout.report_program(episode)
        return episode

    def generating(self, ticket: int) -> AbstractContextManager[None]:
        """Activity of the engine while it generates an attempt. With environments, each turn is an
        activity instead."""
        if self.rollout.player:
            return nullcontext()
        return self.replica.activity("generate", self.step_of(ticket))

    async def report_failed_attempt(self, attempt: Attempt, failure: Failure) -> NextAttempt:
        """Report an attempt that has no rows to the queue. Returns the next attempt, which has
        another prompt under the same ticket."""
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
        """ConfigError if the run has made no progress: ``failure`` is then a programming error, and
        not a problem of the data."""
        status = await asyncio.wrap_future(self.client.status.get())
        if not (status.trained_steps or status.accepted):
            raise ConfigError(failure.as_programming_error)

    # -- spares ------------------------------------------------------------------------------------

    def begin_spare(self, attempt: Attempt) -> Spare | None:
        """Start to generate the attempt after ``attempt``, for a share of the tickets, and unless
        there are as many spares as slots."""
        over_sampling = self.config.rollout.over_sampling
        if attempt.whole or self.spares >= self.slots:
            return None
        if not has_spare(attempt.ticket, over_sampling):
            return None
        self.spares += 1
        following = self.new_attempt(attempt.ticket, attempt.number + 1)
        return Spare(following, asyncio.create_task(self.generate_spare(following)))

    async def generate_spare(self, attempt: Attempt) -> bool:
        """Whether all responses are good. The engine is asked once: its failures show in the other
        requests."""
        try:
            if await self.prepare_media(attempt):
                return False
            with self.generating(attempt.ticket):
                answers = await self.generate(attempt, retries_engine=False)
            return not any(
                isinstance(answer, BadAnswer) or answer.finish_reason == "abort"
                for answer in answers
            )
        except* EngineRetry:
            pass
        finally:
            self.spares -= 1
            # Tokens of spares count as work of the engine.
            self.report(attempt.ticket, attempt.tokens)
        return False

    async def offer_spare(self, spare: Spare) -> None:
        """Offer a spare that its own ticket does not need to other tickets. At staleness 0 no other
        ticket may use it, so it is dropped."""
        if not self.config.max_staleness:
            await spare.abort()
            await self.drop_attempt(spare.attempt, _SURPLUS)
            return
        task = asyncio.create_task(self.store_spare(spare))
        self.unneeded.add(task)
        task.add_done_callback(self.unneeded.discard)

    async def store_spare(self, spare: Spare) -> None:
        """Wait for a spare, and store it in the queue if it is good."""
        try:
            if await spare.generating:
                await self.log.store_spare(spare.attempt)
            else:
                await self.drop_attempt(spare.attempt, _SURPLUS)
        except RelaxError as error:
            print(log_entry(f"a spare prompt group was not dropped: {error}"), flush=True)
        finally:
            await spare.abort()

    async def drop_attempt(self, attempt: Attempt, reason: str) -> None:
        """Drop an attempt that cannot be used. The queue counts it."""
        await asyncio.wrap_future(
            self.client.tickets.drop_attempt(attempt.ticket, attempt.number, reason)
        )


def _batched(
    requests: Sequence[GenerateRequest],
) -> Callable[[Engine], Awaitable[list[Generation | BadAnswer]]]:
    """Function that sends ``requests`` to an engine in one call."""

    async def ask(engine: Engine) -> list[Generation | BadAnswer]:
        # All engines of a run are of one class.
        assert isinstance(engine, BatchedEngine)
        return await engine.generate_all(requests)

    return ask
