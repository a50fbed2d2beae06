"""The rollout role: asks for tickets, has engines generate, computes rewards, puts whole prompt groups into the queue.

Each engine replica has one task that follows the published weights and some that generate. An engine's death ends the
role, and the supervisor starts the group again; a single bad answer costs one prompt group.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from relax_hpc.data.prompts import Prompt, load_tokenizer
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.rendezvous.process import STOP_SIGNALS
from relax_hpc.rewards import RewardError, get_reward
from relax_hpc.roles.context import END, NEWS, TURN, Context
from relax_hpc.rollout.activity import Activity
from relax_hpc.rollout.engine import Engine, EngineFault, GenerateRequest, Generation, Sampling, make_engine
from relax_hpc.rollout.filters import get_filter
from relax_hpc.rollout.outcomes import Failure, Outcomes
from relax_hpc.rollout.samples import PromptSource, group_rows, requests_for, reward_of
from relax_hpc.rollout.unfinished import Unfinished, Work
from relax_hpc.transfer_queue.kept_client import Leftover, keep, kept_rows
from relax_hpc.transfer_queue.records import FILTERED
from relax_hpc.transfer_queue.schema import Row
from relax_hpc.versions import Version
from relax_hpc.weights.staging import Staged
from relax_hpc.weights.subscriber import NOTHING, Subscriber

_NOTED_LINES = 10_000
"""Bad lines beyond so many are left out of the counts."""


class Repeat(Exception):
    """An engine failed to answer, which is counted; it is to be asked again."""


T = TypeVar("T")
_LAST_SAVE_S = 3.0
"""For the queue to take what is unfinished when the role is asked to stop."""


class Rollout:
    """The replicas of one rank of a rollout group; its ranks know nothing of each other."""

    def __init__(self, context: Context) -> None:
        self.context, self.config, self.client = context, context.config, context.client
        self.tokenizer = load_tokenizer(context.model)
        config = self.config
        self.source = PromptSource.load(data_file(context, config.data.train, "train"), self.tokenizer, config)
        self.eval_sets = {name: self._eval_prompts(Path(path)) for name, path in eval_files(context).items()}
        self.reward = get_reward(config.rollout.reward)
        self.eval_reward = get_reward(config.eval.reward)
        stops = tuple(self.tokenizer.eos_ids)
        shape = config.rollout
        self.sampling = Sampling(shape.temperature, shape.top_p, shape.max_new_tokens, stops, config.seed)
        self.greedy = Sampling(0.0, 1.0, shape.max_new_tokens, stops, config.seed)
        self.filter = get_filter(shape.filter)
        self.outcomes = Outcomes(shape)
        self.numbers = replica_numbers(shape.replicas, context.world.rank, context.world.size)
        if context.world.leader:
            self._note_bad_lines()

    def _note_bad_lines(self) -> None:
        """Count them, once a run: an earlier incarnation of the group may have done so."""
        noted = self.client.call("status")["noted"]
        if not any(name.startswith("bad_prompt/") for name in noted):
            for line in self.source.bad[:_NOTED_LINES]:
                self.client.submit("note", what="bad_prompt", name=f"line {line.line}", reason=line.reason)

    def _eval_prompts(self, path: Path) -> list[Prompt]:
        return PromptSource.load(path, self.tokenizer, self.config).prompts[: self.config.eval.samples]

    async def ask(self, op: str, **args: Any) -> dict[str, Any]:
        return await asyncio.wrap_future(self.client.submit(op, **args))

    async def serve(self) -> None:
        """Run the replicas until the run is finished; the first failure ends the others."""
        async with asyncio.TaskGroup() as tasks:
            for number in self.numbers:
                tasks.create_task(Replica(self, number).serve())


class Replica:
    """One engine: its process, the weights it serves, the prompt groups it works on."""

    def __init__(self, rollout: Rollout, number: int) -> None:
        self.rollout, self.number = rollout, number
        self.context, self.config = rollout.context, rollout.config
        context = self.context
        self.place = context.world.local_rank * len(rollout.numbers) + number - rollout.numbers.start
        self.engine = self.new_engine()
        self.ready = asyncio.Event()
        """Cleared while the engine's weights are not known: then nothing is asked of it."""
        planes = rollout.client.store.planes
        self.reader = Subscriber(context.run, rollout.client, f"{context.group}/{number}", planes, self.config.weights)
        self.suspected = asyncio.Event()
        """Set when the engine has shown that it does not serve what it was given."""
        self.replaced = 0
        """Engines in a row that gave no good answer before they were."""
        self.failures = 0
        self.activity: Activity
        """Once the engine has started."""

    async def serve(self) -> None:
        """Start the engine, then follow weights and generate until the run is finished."""
        await self.take_turn()
        await self.engine.start()
        self.activity = Activity(self.context.spans, str(self.number))
        jobs = [self.follow(), *(self.generate() for _ in range(self.config.rollout.requests_in_flight))]
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self.watch())
                await asyncio.wait([tasks.create_task(job) for job in jobs])
                watch.cancel()
        finally:
            await self.engine.close()

    async def watch(self) -> None:
        """Raise when the engine's process has ended."""
        while True:
            await self.ready.wait()
            engine = self.engine
            code = await engine.wait_dead()
            if self.ready.is_set() and engine is self.engine:
                raise RelaxError(f"{engine.name} ended with code {code}; open its log in {self.context.logs}")

    async def follow(self) -> None:
        """Swap to each newest version as it is announced; evaluate where that is due."""
        while True:
            try:
                if "version" not in (announced := await self.news()):
                    return
                self.activity.because([(*NEWS, math.inf)])
                with self.activity("weights", Version.parse(announced["version"]).number):
                    got = await asyncio.to_thread(self.reader.fetch, announced)
                if got is None:
                    continue
                version = Version.parse(got[0].version)
                await self.take_turn()
                self.activity.because([(*TURN, math.inf)])
                await self.update(version, got[1])
                with self.activity("weights", version.number):
                    due = await asyncio.to_thread(self.reader.served, version)
                if due and self.number == 0:
                    await self.evaluate(version)
                if self.config.colocate:
                    await self.rest(version.number)
            except EngineFault as fault:
                await self.quarantine(fault)

    async def news(self, beside: Awaitable[dict] | None = None) -> dict[str, str]:
        """The next version, or {finished}; or what comes ``beside`` it, if that is first.

        EngineFault: the engine does not serve the version that it was given.
        """
        suspected = asyncio.create_task(self.suspected.wait())
        answers = [asyncio.wrap_future(self.reader.newer()), *([asyncio.ensure_future(beside)] if beside else [])]
        try:
            await asyncio.wait((suspected, *answers), return_when=asyncio.FIRST_COMPLETED)
            if suspected.done():
                raise EngineFault("old_version", f"tokens of a version before {self.reader.serving}")
            return next(answer.result() for answer in answers if answer.done())
        finally:
            for task in (suspected, *answers):
                task.cancel()

    async def take_turn(self) -> None:
        """Wait until the actor has made room, on devices that it shares."""
        if self.config.colocate:
            await self.rollout.ask("take_turn", side="engines")

    async def rest(self, step: int) -> None:
        """Make room for the actor when all of ``step`` is generated, unless news come before: of another lineage."""
        if await self.news(beside=self.rollout.ask("step_generated", step=step)):
            return
        self.ready.clear()
        await self.engine.release()
        await self.rollout.ask("rest", reader=self.reader.reader, step=step)

    async def update(self, version: Version, staged: Staged) -> None:
        """Have the engine serve what is staged, which is let go of."""
        try:
            with self.activity("engine_update", version.number):
                await self.engine.update_weights(staged.path, version)
        finally:
            staged.release()
        self.ready.set()
        self.context.report(version.number, {"perf/engine_pause_s": self.engine.pause_s})

    async def quarantine(self, fault: EngineFault) -> None:
        """Put another engine in the place of one of whose weights nothing is sure; it has to pull them anew."""
        if fault.reason == "dead":
            raise RelaxError(str(fault)) from fault
        self.ready.clear()
        self.suspected.clear()
        self.replaced += 1
        await self.rollout.ask("note", what="engine_fault", name=self.reader.reader, reason=fault.reason)
        print(f"{self.engine.name} of replica {self.number} is replaced: {fault}", flush=True)
        if self.replaced >= self.config.rollout.engine.max_failures:
            raise RelaxError(f"{self.engine.name}: {self.replaced} engines in a row, last: {fault}") from fault
        # No tickets for it, and the newest version again.
        await asyncio.to_thread(self.reader.served, NOTHING)
        with self.activity("start", None):
            await self.engine.close()
            self.engine = self.new_engine()
            await self.engine.start()

    def new_engine(self) -> Engine:
        """It serves no version of the run yet."""
        context = self.context
        return make_engine(
            self.config, self.number, context.model, NOTHING, context.logs, context.run.token_file, self.place
        )

    async def evaluate(self, version: Version) -> None:
        """Greedy responses to the evaluation sets; the weights stay as they are meanwhile."""
        values: dict[str, float] = {}
        size = self.config.rollout.groups_per_request * self.config.samples_per_group
        for name, prompts in self.rollout.eval_sets.items():
            scores = 0.0
            for start in range(0, len(prompts), size):
                part = prompts[start : start + size]
                with self.activity("eval", version.number):
                    scores += await self.scores(part)
            values[f"eval/{name}/exact_match"] = scores / max(1, len(prompts))
        await self.rollout.ask("evaluated", version=version.number, values=values)

    async def scores(self, prompts: list[Prompt]) -> float:
        """Sum of the evaluation's rewards for greedy responses, by one request; 0 if they take too long."""
        requests = [request for prompt in prompts for request in requests_for(prompt, 0, 1)]
        answers = await self.answers(requests, self.rollout.greedy)
        limit = self.config.rollout.reward_timeout_s
        try:
            return await within(limit, lambda: sum(map(self.score, prompts, answers)))
        except TimeoutError:
            print(f"evaluation: rewards took longer than rollout.reward_timeout_s={limit:g}, counted as 0", flush=True)
            return 0.0

    def score(self, prompt: Prompt, answer: Generation | EngineFault) -> float:
        """An evaluation's reward; what failed counts as 0."""
        if isinstance(answer, EngineFault):
            return 0.0
        value = reward_of(prompt, answer, self.rollout.tokenizer, self.rollout.eval_reward)
        return 0.0 if isinstance(value, RewardError) else value

    async def generate(self) -> None:
        """Take tickets and turn them into rows, until there are no more."""
        count, reader = self.config.rollout.groups_per_request, self.reader.reader
        while "tickets" in (admitted := await self.rollout.ask("admit", reader=reader, count=count)):
            work = list(zip(admitted["tickets"], admitted["attempts"], strict=True))
            for ticket, failures in admitted["failures"].items():
                self.rollout.outcomes.check_ticket(ticket, failures, "its rows being dropped")
            self.activity.because(admitted["waited"])
            with self.activity("queue", self.step_of(work)):
                kept = await asyncio.to_thread(kept_rows, self.rollout.client, admitted)
                work = await self.put_surplus(work, kept)
            while work:
                work = await self.attempt(work, kept)
        self.activity.because(END)

    async def put_surplus(self, work: Work, kept: dict[int, Leftover]) -> Work:
        """Give tickets the whole groups that the queue had left over; the tickets that are still to be generated."""
        parts = {ticket for ticket, attempt in work if ticket in kept and kept[ticket].is_part_of(ticket, attempt)}
        whole = {ticket: found for ticket, found in kept.items() if ticket not in parts}
        if whole:
            rows = [row for ticket, found in whole.items() for row in found.as_ticket(ticket)]
            reused = {ticket: found.tokens for ticket, found in whole.items()}
            await asyncio.to_thread(self.rollout.client.generated, rows, reused)
        return [(ticket, attempt) for ticket, attempt in work if ticket not in whole]

    async def attempt(self, work: Work, kept: dict[int, Leftover]) -> Work:
        """Generate once; what must be tried again, with the next attempt's number."""
        rollout, samples = self.rollout, self.config.samples_per_group
        prompts = [rollout.source.prompt(ticket, attempt) for ticket, attempt in work]
        groups = Unfinished(work, prompts, kept, samples)
        step = self.step_of(work)
        async with self.saving(groups):
            with self.activity("generate", step):
                answers = await self.finish(groups)
            with self.activity("queue", step):
                rows, failed = await self.judge(prompts, work, answers)
        with self.activity("queue", step):
            reused = {t: n for t, n in groups.reused().items() if t not in {ticket for ticket, *_ in failed}}
            if rows:
                await asyncio.to_thread(rollout.client.generated, rows, reused)
        tokens = sum(len(row["token_ids"]) - row["prompt_len"] for row in rows) - sum(reused.values())
        self.context.report(step, {"perf/rollout_tokens": tokens})
        return [(ticket, await self.failed(ticket, attempt, failure)) for ticket, attempt, failure in failed]

    def step_of(self, work: Work) -> int:
        """The step that the first ticket of ``work`` is for."""
        return work[0][0] // self.config.groups_per_step

    async def finish(self, groups: Unfinished) -> list[Generation | EngineFault]:
        """The samples of ``groups``, of which the engine draws what is missing."""
        while requests := groups.requests():
            with contextlib.suppress(Repeat):
                return groups.complete(requests, await self.once(requests, self.rollout.sampling))
        return groups.complete([], [])

    @asynccontextmanager
    async def saving(self, groups: Unfinished) -> AsyncIterator[None]:
        """Have the queue keep what there is of ``groups``, now and then and when the body is cancelled."""
        ended, every = asyncio.Event(), self.config.rollout.save_partial_every_s

        async def save_now_and_then() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every):
                        await ended.wait()
                    return
                await asyncio.to_thread(self.save, groups)

        saver = asyncio.create_task(save_now_and_then())
        try:
            yield
        except asyncio.CancelledError:
            ended.set()
            await saver
            await asyncio.to_thread(self.save, groups, _LAST_SAVE_S)
            raise
        finally:
            ended.set()
            await saver

    def save(self, groups: Unfinished, timeout: float | None = None) -> None:
        """Hand over what the queue does not have; if it cannot, no more is lost than with the process."""
        shape = self.config.rollout
        if shape.save_partial == "off":
            return
        made = groups.news(shape.save_partial == "tokens", shape.max_new_tokens)
        if made:
            try:
                rows, reused = groups.rows(made), groups.reused(list(made))
                groups.kept(made, keep(self.rollout.client, rows, dict(groups.work), reused, timeout=timeout))
            except (RelaxError, OSError) as error:
                print(f"{len(made)} samples of unfinished prompt groups were not saved: {error}", flush=True)

    async def answers(self, requests: list[GenerateRequest], sampling: Sampling) -> list[Generation | EngineFault]:
        """The engine's answers; a request that fails as a whole is repeated, a few times in a row at most."""
        while True:
            with contextlib.suppress(Repeat):
                return await self.once(requests, sampling)

    async def once(self, requests: list[GenerateRequest], sampling: Sampling) -> list[Generation | EngineFault]:
        """The engine's answers; Repeat if the request failed as a whole."""
        await self.ready.wait()
        engine = self.engine
        try:
            answers = await engine.generate(requests, sampling)
        except EngineFault as fault:
            # What was asked of an engine that is replaced was no fault of its own.
            if self.ready.is_set() and engine is self.engine:
                await self.fault(fault)
            raise Repeat from fault
        if engine is not self.engine or not self.ready.is_set():
            # Its weights may have been half of one version and half of another.
            raise Repeat
        if any(isinstance(answer, EngineFault) and answer.reason == "old_version" for answer in answers):
            self.ready.clear()
            self.suspected.set()
            raise Repeat
        self.failures = self.replaced = 0
        return answers

    async def fault(self, fault: EngineFault) -> None:
        self.failures += 1
        await self.rollout.ask("note", what="engine_fault", name=self.reader.reader, reason=fault.reason)
        if self.failures >= self.config.rollout.engine.max_failures:
            raise RelaxError(f"{self.engine.name} failed {self.failures} times in a row, last: {fault}") from fault

    async def judge(
        self, prompts: list[Prompt], work: Work, answers: list
    ) -> tuple[list[Row], list[tuple[int, int, Failure]]]:
        """Rows of the prompt groups that came out whole, and the others with their reasons."""
        limit = self.config.rollout.reward_timeout_s
        try:
            groups = await within(limit, lambda: self.groups(prompts, work, answers))
        except TimeoutError:
            detail = f"reward_timeout: the request's rewards took longer than rollout.reward_timeout_s={limit:g}"
            groups = [Failure("reward_timeout", detail)] * len(work)
        for group in groups:
            self.rollout.outcomes.count(group)
        rows = [row for group in groups if not isinstance(group, Failure) for row in group]
        return rows, [(*tried, group) for tried, group in zip(work, groups, strict=True) if isinstance(group, Failure)]

    def groups(self, prompts: list[Prompt], work: Work, answers: list) -> list[list[Row] | Failure]:
        """What became of each prompt group."""
        size, rollout = self.config.samples_per_group, self.rollout
        parts = [answers[start : start + size] for start in range(0, len(answers), size)]
        newest_only = self.config.algorithm.mask_older_tokens
        return [
            group_rows(prompt, ticket, part, rollout.tokenizer, rollout.reward, rollout.filter, newest_only)
            for prompt, (ticket, _), part in zip(prompts, work, parts, strict=True)
        ]

    async def failed(self, ticket: int, attempt: int, failure: Failure) -> int:
        """Count a group that is not put; the number of the next attempt, by another prompt under the same ticket."""
        self.rollout.outcomes.check_share(failure)
        if failure.reason != FILTERED:
            print(f"ticket {ticket}, attempt {attempt}: {failure.detail}", flush=True)
        answer = await self.rollout.ask("fail", ticket=ticket, attempt=attempt, reason=failure.reason)
        self.rollout.outcomes.check_ticket(ticket, answer["failures"], failure.detail)
        return answer["attempt"]


def replica_numbers(replicas: int, rank: int, ranks: int) -> range:
    """Replicas that ``rank`` hosts, out of the group's. ConfigError: the ranks cannot have equal numbers of them."""
    if replicas % ranks:
        raise ConfigError(
            f"rollout.replicas: found {replicas} for {ranks} ranks (one a node of the group), allowed: multiples of "
            f"{ranks}; change it, or resources.nodes of the group"
        )
    each = replicas // ranks
    return range(rank * each, (rank + 1) * each)


async def within(seconds: float, function: Callable[[], T]) -> T:
    """What `function` returns, in a thread of its own. TimeoutError: it takes longer, and its thread is left behind."""
    pool = ThreadPoolExecutor(1)
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.get_running_loop().run_in_executor(pool, function)
    finally:
        pool.shutdown(wait=False)


def data_file(context: Context, configured: str, name: str) -> Path:
    """A configured file, or the built-in task's."""
    return Path(configured) if configured else context.run.data / f"{name}.jsonl"


def eval_files(context: Context) -> dict[str, str]:
    """Evaluation sets: configured ones, or the built-in task's held-out files."""
    if context.config.data.eval or not context.config.data.task:
        return context.config.data.eval
    names = ("heldout_multisets", "heldout_prompts")
    return {name: str(context.run.data / f"{name}.jsonl") for name in names}


def run(context: Context) -> None:
    """Generate until the run is finished."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await Rollout(context).serve()

    try:
        asyncio.run(main())
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    except asyncio.CancelledError:
        raise RelaxError("asked to stop") from None


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The error that a user should read of a task group's: a configuration or progress error before all others."""
    errors: list[BaseException] = []
    for error in group.exceptions:
        errors.append(first_error(error) if isinstance(error, BaseExceptionGroup) else error)
    return max(errors, key=lambda error: getattr(error, "exit_code", 0))
