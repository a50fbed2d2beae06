"""A replica of the rollout role: one engine, which follows the published weights while requests are
asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.metrics.writer import CACHED, READ
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.base.versions import Version
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client.answers import EVALUATION_DUE, PublishedVersion
from relax_hpc.queue.process_context import NEWS, TURN
from relax_hpc.rewards import RewardError
from relax_hpc.rollout.engine_activity import Activity
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    Engine,
    EngineFault,
    Episode,
    GenerateRequest,
    Generation,
)
from relax_hpc.rollout.engines.pool import EngineId
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.play import Repeat, play
from relax_hpc.rollout.episodes.turns import Start
from relax_hpc.rollout.evaluation import Evaluated, Tally
from relax_hpc.rollout.media import UNUSABLE
from relax_hpc.rollout.samples import last_response, requests_for
from relax_hpc.rollout.ticket_worker import TicketWorker
from relax_hpc.training.weights.node_cache import StagedFolder
from relax_hpc.training.weights.relay import relay_pays
from relax_hpc.training.weights.subscriber import NOTHING, Subscriber

if TYPE_CHECKING:
    from relax_hpc.rollout.rollout_rank import Rollout

T = TypeVar("T")
FOR_TURN = "waiting for the actor to make room"
"""Words for an engine that has not started yet, which is no part of its start."""
_TELL_S = 0.5
"""Seconds between two looks at what an engine that starts is doing."""


class Replica:
    """One engine: its process, the weights it serves, the prompt groups it works on."""

    def __init__(self, rollout: Rollout, entry: EngineId) -> None:
        self.rollout, self.number, self.place = rollout, entry.number, entry.local_number
        self.context, self.config = rollout.context, rollout.config
        context, number = self.context, entry.number
        self.engine = self.new_engine()
        if context.log_rotator:
            context.log_rotator.add(context.logs / f"engine-{number}.log")
        self.ready = asyncio.Event()
        """Event that is cleared while the engine's weights are not known: then nothing is asked of
        it."""
        planes = rollout.client.store.planes
        reader = f"{context.group}/{number}"
        about = {"evaluates": True, "relays": relay_pays(self.config)}
        self.reader = Subscriber(
            context.run, rollout.client, reader, planes, self.config.weights, **about
        )
        self.suspected = asyncio.Event()
        """Event that is set when the engine has shown that it does not serve what it was given."""
        self.replaced = 0
        """Engines in a row that were replaced before they gave a good answer."""
        self.failures = 0
        """Failures of the engine in a row."""
        self.failed = 0
        """Failures of the engine ever: what was asked before a failure has failed by that one."""
        self.read = Counter[str]()
        """Tokens that the engine was asked with, and had read before, since they were last
        reported."""
        self.leaving = asyncio.Event()
        """Event that is set when the engine is to take no more work."""
        self.started = False
        self.activity: Activity
        """Activity of the engine, set once it has started."""

    async def serve(self) -> None:
        """Start the engine, then follow weights and generate until the run is finished, or the
        engine leaves."""
        try:
            starting = await self.until_leaving(self.begin())
            if starting.cancelled():
                return
            starting.result()
            self.started, self.activity = True, Activity(self.context.spans, str(self.number))
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self.watch())
                await asyncio.wait(
                    [tasks.create_task(job) for job in (self.follow(), TicketWorker(self).serve())]
                )
                watch.cancel()
            if self.leaving.is_set():
                # What it was just loading when it said so before it serves no more either.
                await asyncio.to_thread(self.reader.served, NOTHING)
        finally:
            await self.engine.close()
        if not self.leaving.is_set():
            self.rollout.over()

    def start_leaving(self) -> None:
        """Take no more tickets and no newer weights; `serve` ends when what it draws is in the log,
        for others to go on with, and what is drawn is put. ConfigError with `colocate`: the actor
        waits for all engines of the configuration to make room."""
        if self.config.colocate:
            raise ConfigError(
                f"colocate: engine {self.number} may not leave, as the actor takes turns with all "
                "of rollout.replicas engines; stop the run, and go on with --resume and fewer"
            )
        self.leaving.set()

    async def until_leaving(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """``work``, which has ended, cancelled if the engine is asked to leave before."""
        task, leaving = asyncio.create_task(work), asyncio.create_task(self.leaving.wait())
        try:
            await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            task.cancel()
            await asyncio.wait([task])
        return task

    async def unless_leaving(self, asking: asyncio.Future[T]) -> T | None:
        """Answer of the queue to who asks for tickets; None once the engine is to leave.

        The queue may have granted some at that moment, which must not be lost; so it is told first
        that there will be no weights to draw them by, after which it grants none.
        """
        leaving = asyncio.create_task(self.leaving.wait())
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not asking.done():
                await asyncio.to_thread(self.reader.served, NOTHING)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            leaving.cancel()

    async def begin(self) -> None:
        """Start the engine, when it is its turn."""
        if self.config.colocate:
            self.rollout.tell(f"engine {self.number}", FOR_TURN)
            await self.take_turn()
        await self.start()

    async def watch(self) -> None:
        """Raise when the engine's process has ended."""
        while True:
            await self.ready.wait()
            engine = self.engine
            what = await engine.wait_dead()
            if self.ready.is_set() and engine is self.engine:
                raise RelaxError(f"{engine.name}: {what}; open its log in {self.context.logs}")

    async def follow(self) -> None:
        """Swap to each newest version as it is announced; evaluate where that is due."""
        while True:
            try:
                if (announced := await self.news()) is None:
                    return
                self.activity.because([(*NEWS, math.inf)])
                if announced is EVALUATION_DUE:
                    await self.evaluate(self.reader.serving)
                    continue
                with self.activity("weights", Version.parse(announced.version).number):
                    got = await asyncio.to_thread(self.reader.fetch, announced)
                if got is None:
                    continue
                version = Version.parse(got[0].version)
                await self.take_turn()
                self.activity.because([(*TURN, math.inf)])
                await self.update(version, got[1])
                with self.activity("weights", version.number):
                    due = await asyncio.to_thread(self.reader.served, version)
                if due:
                    await self.evaluate(version)
                if self.config.colocate:
                    await self.rest(version.number)
            except EngineFault as fault:
                await self.quarantine(fault)

    async def news(self) -> PublishedVersion | None:
        """The next version; None: the run is finished, or the engine leaves. EngineFault: see
        `_come_first`."""
        newer = asyncio.wrap_future(self.reader.newer())
        await self._come_first(newer)
        return newer.result() if newer.done() and not newer.cancelled() else None

    async def _come_first(self, *answers: asyncio.Future) -> None:
        """Wait for one of ``answers``, unless the engine leaves; none of them is waited for any
        more then.

        EngineFault: the engine does not serve the version that it was given.
        """
        suspected, leaving = (
            asyncio.create_task(event.wait()) for event in (self.suspected, self.leaving)
        )
        try:
            await asyncio.wait((suspected, leaving, *answers), return_when=asyncio.FIRST_COMPLETED)
            if suspected.done():
                raise EngineFault(
                    "old_version", f"tokens of a version before {self.reader.serving}"
                )
        finally:
            for task in (suspected, leaving, *answers):
                task.cancel()

    async def take_turn(self) -> None:
        """Wait until the actor has made room, on devices that it shares."""
        if self.config.colocate:
            await asyncio.wrap_future(self.rollout.client.training.take_turn("engines"))

    async def rest(self, step: int) -> None:
        """Make room for the actor when all of ``step`` is generated, unless news come before: of
        another lineage."""
        training = self.rollout.client.training
        newer, generated = map(
            asyncio.wrap_future, (self.reader.newer(), training.step_generated(step))
        )
        await self._come_first(newer, generated)
        if newer.done() and not newer.cancelled():
            return
        self.ready.clear()
        await self.engine.release()
        await asyncio.wrap_future(training.end_engine_turn(self.reader.reader, step))

    async def update(self, version: Version, staged: StagedFolder) -> None:
        """Have the engine serve the staged weights, which are released then."""
        try:
            with self.activity("engine_update", version.number):
                await self.engine.update_weights(staged.path, version)
        finally:
            staged.release()
        self.ready.set()
        self.context.report(version.number, {"perf/engine_pause_s": self.engine.pause_s})

    async def quarantine(self, fault: EngineFault) -> None:
        """Put another engine in the place of one of whose weights nothing is sure; it has to pull
        them anew."""
        if fault.reason == "dead":
            raise RelaxError(str(fault)) from fault
        self.ready.clear()
        self.suspected.clear()
        self.replaced += 1
        await self.note(fault)
        print(
            log_entry(f"{self.engine.name} of replica {self.number} is replaced: {fault}"),
            flush=True,
        )
        if self.replaced >= self.config.rollout.engine.max_failures:
            raise RelaxError(
                f"{self.engine.name}: {self.replaced} engines in a row, last: {fault}"
            ) from fault
        # No tickets for it, and the newest version again.
        await asyncio.to_thread(self.reader.served, NOTHING)
        with self.activity("start", None):
            await self.engine.close()
            self.engine = self.new_engine()
            await self.start()

    async def start(self) -> None:
        """Start the engine, and say what it is at meanwhile: that takes minutes on a GPU."""
        telling = asyncio.create_task(self.tell())
        try:
            await self.engine.start()
        finally:
            telling.cancel()
            self.rollout.tell(f"engine {self.number}", "")

    async def tell(self) -> None:
        while True:
            self.rollout.tell(f"engine {self.number}", self.engine.phase)
            await asyncio.sleep(_TELL_S)

    def new_engine(self) -> Engine:
        """New engine that serves no version of the run yet."""
        context = self.context
        return make_engine(
            self.config, self.number, context.model, NOTHING, context.logs, self.place
        )

    async def evaluate(self, version: Version) -> None:
        """Evaluate what the engine serves, unless it leaves. EngineFault: see `_come_first`."""
        evaluation = asyncio.create_task(self.evaluation(version))
        await self._come_first(evaluation)
        if evaluation.done() and not evaluation.cancelled():
            evaluation.result()

    async def evaluation(self, version: Version) -> None:
        """Responses to the evaluation sets; the weights stay as they are meanwhile."""
        values, settings = dict[str, float](), self.config.eval
        size = self.config.rollout.groups_per_request * self.config.samples_per_prompt
        size = max(1, size // settings.responses)
        for name, prompts in self.rollout.eval_sets.items():
            tally, count = Tally(settings), min(len(prompts), settings.samples)
            for start in range(0, count, size):
                part = await asyncio.to_thread(
                    prompts.__getitem__, slice(start, min(start + size, count))
                )
                with self.activity("eval", version.number):
                    scored = await self.scored(part)
                for _, _, score in scored:
                    if isinstance(score, RewardError):
                        self.rollout.report_failure(score.reason, score.detail, score.origin)
                for at in range(0, len(scored), settings.responses):
                    tally.add([score for _, _, score in scored[at : at + settings.responses]])
                await asyncio.to_thread(self.rollout.samples.evaluated, name, version, scored)
            values |= tally.values(name)
            await self.note_failed(name, version, tally)
        await asyncio.wrap_future(self.rollout.client.weights.evaluated(version.number, values))

    async def note_failed(self, name: str, version: Version, tally: Tally) -> None:
        """Have the queue count responses of an evaluation that have no reward."""
        for reason, count in tally.failed.items():
            print(
                log_entry(
                    f"evaluation of {version} on {name}: {count} responses left out, {reason}"
                ),
                flush=True,
            )
            for number in range(count):
                note = self.rollout.client.status.note(
                    "eval_failed", f"{name}/{version.number}/{number}", reason
                )
                await asyncio.wrap_future(note)

    async def scored(self, prompts: list[Prompt]) -> list[Evaluated]:
        """All responses to the prompts, drawn together, each with the evaluation's reward."""
        drawn = await asyncio.gather(*map(self.drawn, prompts))
        each = [prompt for prompt, answers in drawn for _ in answers]
        answers = [answer for _, some in drawn for answer in some]
        return list(
            zip(each, answers, await self.rollout.judging.evaluated(each, answers), strict=True)
        )

    async def drawn(self, prompt: Prompt) -> tuple[Prompt, list[Generation | Episode | BadAnswer]]:
        """A prompt of an evaluation, its media stored, and all responses to it."""
        settings = self.config.eval
        budget = settings.max_new_tokens or self.config.rollout.max_new_tokens
        try:
            prompt = await self.rollout.media.of_evaluation(prompt)
        except UNUSABLE as bad:
            return prompt, [BadAnswer("bad_media", str(bad))] * settings.responses
        requests = requests_for(prompt, 0, settings.responses, self.rollout.eval_sampling, budget)
        return prompt, await asyncio.gather(*(self.answer(prompt, request) for request in requests))

    async def answer(
        self, prompt: Prompt, request: GenerateRequest
    ) -> Generation | Episode | BadAnswer:
        """An episode against the environment, or the end of another; asked for again while the
        engine fails, a few times in a row at most."""
        if self.rollout.player:
            start = Start(prompt, request, self.once)
            episode = await self.rollout.player.play(History(), start)
            self.rollout.report_program(episode)
            return episode
        while True:
            with contextlib.suppress(Repeat):
                made = await play(
                    self.rollout.task, request, self.once, self.config.rollout.episode_timeout_s
                )
                return made if isinstance(made, BadAnswer) else last_response(made)

    async def once(self, request: GenerateRequest, counted: bool = True) -> Generation | BadAnswer:
        """The engine's answer, or what is wrong with it. Repeat: there is none, which ends the role
        if too many that are ``counted`` have none."""

        async def ask(engine: Engine) -> Generation | BadAnswer:
            known = len(request.context_ids)
            try:
                answer = await engine.generate(request)
            except BadAnswer as bad:
                return bad
            if answer.cached is not None:
                self.read.update({READ: known, CACHED: answer.cached})
            return answer

        return await self.asked(ask, counted)

    async def asked(self, ask: Callable[[Engine], Awaitable[T]], counted: bool = True) -> T:
        """Answer of the engine; Repeat as `once`."""
        await self.ready.wait()
        engine, failed = self.engine, self.failed
        try:
            answer = await ask(engine)
        except EngineFault as fault:
            await self.act_on(fault, engine, counted and failed == self.failed)
            raise Repeat from fault
        if engine is not self.engine or not self.ready.is_set():
            # Its weights may have been half of one version and half of another.
            raise Repeat
        self.failures = self.replaced = 0
        return answer

    async def act_on(self, fault: EngineFault, engine: Engine, counted: bool) -> None:
        """Count a fault, or have an engine replaced that serves older weights than it was given."""
        # What was asked of an engine that is replaced was no fault of its own.
        if engine is not self.engine or not self.ready.is_set():
            return
        if fault.reason == "old_version" and not self.leaving.is_set():
            self.ready.clear()
            self.suspected.set()
        elif counted:
            self.failed += 1
            self.failures = failures = self.failures + 1
            await self.note(fault)
            if failures >= self.config.rollout.engine.max_failures:
                raise RelaxError(
                    f"{engine.name} failed {failures} times in a row, last: {fault}"
                ) from fault

    async def note(self, fault: EngineFault) -> None:
        """Let the queue count ``fault``."""
        self.rollout.report_failure(fault.reason, str(fault), fault.origin)
        await asyncio.wrap_future(
            self.rollout.client.status.note("engine_fault", self.reader.reader, fault.reason)
        )
