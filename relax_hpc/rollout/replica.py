"""A replica of the rollout role: one engine, which follows the published weights while it
generates."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.metrics.writer import CACHED, READ
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.base.versions import Version
from relax_hpc.data.generation import GenerateRequest, Generation
from relax_hpc.queue.client.answers import EVALUATION_DUE, PublishedVersion
from relax_hpc.queue.process_context import NEWS, TURN
from relax_hpc.rollout.engine_activity import Activity
from relax_hpc.rollout.engine_profile import EngineProfile
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import BadAnswer, Engine, EngineFault
from relax_hpc.rollout.engines.pool import EngineId
from relax_hpc.rollout.episodes.play import EngineRetry
from relax_hpc.rollout.evaluation import EvaluationRunner
from relax_hpc.rollout.ticket_worker import TicketWorker
from relax_hpc.training.weights.node_cache import StagedFolder
from relax_hpc.training.weights.relay import relay_pays
from relax_hpc.training.weights.subscriber import NOTHING, Subscriber

if TYPE_CHECKING:
    from relax_hpc.rollout.rollout_rank import Rollout

T = TypeVar("T")
FOR_TURN = "waiting for the actor to make room"
"""Phase of an engine that waits for its turn. It is not a phase of its start."""
_PHASE_POLL_S = 0.1
"""Seconds between two reads of the phase of a starting engine."""


class EngineEndError(RelaxError):
    """The process of an engine has ended.

    ``start_error``: error that recurs at each start, see `relax_hpc.base.errors.find_start_error`.
    """

    start_error = ""


class Replica:
    """One engine: its process, the weights it serves, the prompt groups it works on."""

    def __init__(self, rollout: Rollout, engine_id: EngineId) -> None:
        self.rollout = rollout
        self.number, self.local_number = engine_id.number, engine_id.local_number
        self.context, self.config = rollout.context, rollout.config
        context = self.context
        self.start_version = NOTHING
        """Version of the weights with which the engine starts. It is a version of the run only if
        nothing is trained."""
        self.engine = self.new_engine()
        self.rotate_log()
        self.profile = EngineProfile(context, self.number)
        self.ready = asyncio.Event()
        """Event that is cleared while the engine's weights are unknown. No request is sent then."""
        self.reader = Subscriber(
            context.run,
            rollout.client,
            f"{context.group}/{self.number}",
            rollout.client.store.planes,
            self.config.weights,
            evaluates=True,
            relays=relay_pays(self.config),
        )
        self.suspected = asyncio.Event()
        """Event that is set when a response shows that the engine serves other weights than it was
        given."""
        self.replaced = 0
        """Consecutive replacements of the engine without a good response."""
        self.failures = 0
        """Consecutive failures of the engine."""
        self.failure_count = 0
        """All failures of the engine. A request that was sent before the last failure has failed
        for the same reason."""
        self.read = Counter[str]()
        """Tokens of requests, and cached tokens among them, since the last report."""
        self.leaving = asyncio.Event()
        """Event that is set when the engine takes no more work."""
        self.started = False
        self.activity: Activity
        """Activity of the engine, set when it has started."""

    def rotate_log(self) -> None:
        """Let the log of the engine be rotated."""
        if self.context.log_rotator:
            self.context.log_rotator.add(self.context.logs / f"engine-{self.number}.log")

    async def serve(self) -> None:
        """Start the engine, then follow weights and generate until the run is finished or the
        engine leaves."""
        try:
            starting = await self.until_leaving(self.start_in_turn())
            if starting.cancelled():
                return
            starting.result()
            self.started, self.activity = True, Activity(self.context.spans, str(self.number))
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self.watch())
                following = tasks.create_task(self.follow())
                working = tasks.create_task(TicketWorker(self).serve())
                await asyncio.wait([following, working])
                watch.cancel()
            if self.leaving.is_set():
                # `follow` may have reported a version after `unless_leaving` has withdrawn it.
                await asyncio.to_thread(self.reader.served, NOTHING)
        finally:
            await self.profile.close(self.engine)
            await self.engine.close()
        if not self.leaving.is_set():
            self.rollout.finish_starting_engines()

    def start_leaving(self) -> None:
        """Take no more tickets and no newer weights. `serve` ends when unfinished attempts are in
        the log, for others to continue, and finished ones are put. ConfigError with `colocate`: the
        actor waits for all engines of the configuration to make room."""
        if self.config.colocate:
            raise ConfigError(
                f"colocate: engine {self.number} may not leave, because the actor takes turns with "
                "all of rollout.replicas engines; stop the run, and continue with --resume and "
                "fewer"
            )
        self.leaving.set()

    async def until_leaving(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """The ended task of ``work``. It is cancelled if the engine starts to leave before its
        end."""
        task, leaving = asyncio.create_task(work), asyncio.create_task(self.leaving.wait())
        try:
            await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            task.cancel()
            await asyncio.wait([task])
        return task

    async def unless_leaving(self, asking: asyncio.Future[T]) -> T | None:
        """The queue's answer to a request for tickets; None: the engine leaves.

        The queue may admit tickets just before the request is cancelled, and they must not be lost.
        So the replica first reports that the engine serves no weights. After that the queue admits
        none.
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

    async def start_in_turn(self) -> None:
        """Start the engine; with `colocate`, when it is the engines' turn."""
        if self.config.colocate:
            self.rollout.set_phase(f"engine {self.number}", FOR_TURN)
            await self.take_turn()
        await self.start()

    async def watch(self) -> None:
        """Raise when the engine's process has ended."""
        while True:
            await self.ready.wait()
            engine = self.engine
            description = await engine.wait_dead()
            if self.ready.is_set() and engine is self.engine:
                error = EngineEndError(
                    f"{engine.name}: {description}; open its log in {self.context.logs}"
                )
                error.start_error = getattr(engine, "start_error", "")
                raise error

    async def follow(self) -> None:
        """Load the newest version whenever one is announced, and evaluate when that is due."""
        while True:
            try:
                announced = await self.await_version()
                if announced is None:
                    return
                self.activity.set_wait_causes([(*NEWS, math.inf)])
                if announced is EVALUATION_DUE:
                    await self.evaluate(self.reader.serving)
                else:
                    await self.load_version(announced)
            except EngineFault as fault:
                await self.replace_engine(fault)

    async def load_version(self, announced: PublishedVersion) -> None:
        """Fetch an announced version and serve it."""
        if self.config.only == "rollout":
            await self.serve_start_weights()
            return
        with self.activity("weights", Version.parse(announced.version).number):
            fetched = await asyncio.to_thread(self.reader.fetch, announced)
        if fetched is None:
            return
        manifest, staged = fetched
        version = Version.parse(manifest.version)
        await self.take_turn()
        self.activity.set_wait_causes([(*TURN, math.inf)])
        await self.update(version, staged)
        with self.activity("weights", version.number):
            is_evaluation_due = await asyncio.to_thread(self.reader.served, version)
        if is_evaluation_due:
            await self.evaluate(version)
        if self.config.colocate:
            await self.end_turn(version.number)

    async def serve_start_weights(self) -> None:
        """Serve the weights with which the engine has started."""
        self.ready.set()
        await asyncio.to_thread(self.reader.served, self.start_version)

    async def await_version(self) -> PublishedVersion | None:
        """The next version; None: the run is finished, or the engine leaves. EngineFault: see
        `_wait_for_first`."""
        newer = asyncio.wrap_future(self.reader.newer())
        await self._wait_for_first(newer)
        return newer.result() if newer.done() and not newer.cancelled() else None

    async def _wait_for_first(self, *answers: asyncio.Future) -> None:
        """Wait for one of ``answers``, or until the engine leaves, and cancel the others.

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
        """Wait until the actor has freed shared devices."""
        if self.config.colocate:
            await asyncio.wrap_future(self.rollout.client.training.take_turn("engines"))

    async def end_turn(self, step: int) -> None:
        """Free the devices for the actor when all of ``step`` is generated, unless a version of
        another lineage is announced before."""
        training = self.rollout.client.training
        newer = asyncio.wrap_future(self.reader.newer())
        generated = asyncio.wrap_future(training.step_generated(step))
        await self._wait_for_first(newer, generated)
        if newer.done() and not newer.cancelled():
            return
        self.ready.clear()
        await self.engine.release()
        await asyncio.wrap_future(training.end_engine_turn(self.reader.reader, step))

    async def update(self, version: Version, staged: StagedFolder) -> None:
        """Load the staged weights into the engine, and release them."""
        try:
            with self.activity("engine_update", version.number):
                await self.engine.update_weights(staged.path, version)
        finally:
            staged.release()
        self.ready.set()
        self.context.report(version.number, {"perf/engine_pause_s": self.engine.pause_s})

    async def replace_engine(self, fault: EngineFault) -> None:
        """Replace an engine whose weights are unknown by a new one, which loads the newest
        version."""
        if fault.reason == "dead":
            raise RelaxError(str(fault)) from fault
        self.ready.clear()
        self.suspected.clear()
        self.replaced += 1
        await self.report_fault(fault)
        print(
            log_entry(f"{self.engine.name} of replica {self.number} is replaced: {fault}"),
            flush=True,
        )
        if self.replaced >= self.config.rollout.engine.max_failures:
            raise RelaxError(
                f"{self.engine.name}: {self.replaced} engines in a row, last: {fault}"
            ) from fault
        # The queue then admits no tickets for it, and announces the newest version again.
        await asyncio.to_thread(self.reader.served, NOTHING)
        with self.activity("start", None):
            await self.engine.close()
            self.engine = self.new_engine()
            await self.start()

    async def start(self) -> None:
        """Start the engine, and report its phase meanwhile. A start takes minutes on a GPU."""
        if self.config.only == "rollout" and self.start_version == NOTHING:
            announced = await asyncio.wrap_future(self.reader.newer())
            if announced:
                self.start_version = Version.parse(announced.version)
                self.engine = self.new_engine()
        reporting = asyncio.create_task(self.report_phases())
        try:
            await self.engine.start()
        finally:
            reporting.cancel()
            self.rollout.set_phase(f"engine {self.number}", "")

    async def report_phases(self) -> None:
        """Report the phase of the engine until cancelled."""
        while True:
            self.rollout.set_phase(f"engine {self.number}", self.engine.phase)
            await asyncio.sleep(_PHASE_POLL_S)

    def new_engine(self) -> Engine:
        """New engine that serves no version of the run yet, or the start version."""
        context, version = self.context, self.start_version
        return make_engine(
            self.config, self.number, context.model, version, context.logs, self.local_number
        )

    async def evaluate(self, version: Version) -> None:
        """Evaluate the served version, unless the engine leaves. EngineFault: see
        `_wait_for_first`."""
        evaluating = asyncio.create_task(EvaluationRunner(self).run(version))
        await self._wait_for_first(evaluating)
        if evaluating.done() and not evaluating.cancelled():
            evaluating.result()

    async def ask_once(
        self, request: GenerateRequest, counts_failure: bool = True
    ) -> Generation | BadAnswer:
        """The engine's response, or the error of one that cannot be used. EngineRetry: the engine
        has failed. If ``counts_failure``, too many failures in a row end the role."""

        async def ask(engine: Engine) -> Generation | BadAnswer:
            context_tokens = len(request.context_ids)
            try:
                answer = await engine.generate(request)
            except BadAnswer as bad:
                return bad
            if answer.cached is not None:
                self.read.update({READ: context_tokens, CACHED: answer.cached})
            return answer

        return await self.ask_engine(ask, counts_failure)

    async def ask_engine(
        self, ask: Callable[[Engine], Awaitable[T]], counts_failure: bool = True
    ) -> T:
        """The result of ``ask`` for the engine. EngineRetry: as `ask_once`."""
        await self.ready.wait()
        engine, failure_count = self.engine, self.failure_count
        try:
            answer = await ask(engine)
        except EngineFault as fault:
            is_first = failure_count == self.failure_count
            await self.handle_fault(fault, engine, counts_failure and is_first)
            raise EngineRetry from fault
        if engine is not self.engine or not self.ready.is_set():
            # The engine is being replaced. It may have used weights of two versions.
            raise EngineRetry
        self.failures = self.replaced = 0
        return answer

    async def handle_fault(self, fault: EngineFault, engine: Engine, counts_failure: bool) -> None:
        """Count a fault, or let an engine be replaced that serves older weights than it was
        given."""
        # Faults of an engine that is being replaced do not count.
        if engine is not self.engine or not self.ready.is_set():
            return
        if fault.reason == "old_version" and not self.leaving.is_set():
            self.ready.clear()
            self.suspected.set()
        elif counts_failure:
            self.failure_count += 1
            self.failures = failures = self.failures + 1
            await self.report_fault(fault)
            if failures >= self.config.rollout.engine.max_failures:
                raise RelaxError(
                    f"{engine.name} failed {failures} times in a row, last: {fault}"
                ) from fault

    async def report_fault(self, fault: EngineFault) -> None:
        """Report ``fault`` to the queue, which counts it."""
        self.rollout.report_failure(fault.reason, str(fault), fault.origin)
        await asyncio.wrap_future(
            self.rollout.client.status.note("engine_fault", self.reader.reader, fault.reason)
        )
