"""A process of a rollout group: it asks for tickets, has engines generate, computes rewards and
puts whole prompt groups into the queue.

Each engine replica has one task that follows the published weights and some that generate. If an
engine dies, the process ends, and the supervisor starts the group again; a single bad answer costs
one prompt group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from relax_hpc.base.error_origin import NO_ORIGIN, ErrorOrigin
from relax_hpc.base.metrics.first_failures import FirstFailure, FirstFailures
from relax_hpc.base.metrics.writer import SKIPPED
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.environments.base import EnvironmentFault
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.agents.agents import failure_of_program
from relax_hpc.rollout.attempt import Attempt
from relax_hpc.rollout.bad_row_reports import note_bad_lines
from relax_hpc.rollout.engines.engine import BadAnswer, Episode, Generation, Sampling
from relax_hpc.rollout.engines.pool import EnginePool, assigned_engines
from relax_hpc.rollout.engines.stops import with_stops
from relax_hpc.rollout.episodes.player import player_of
from relax_hpc.rollout.group_rewards import Judge
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.rollout.membership import Membership
from relax_hpc.rollout.outbox import Outbox
from relax_hpc.rollout.outcomes import Failure, Outcomes
from relax_hpc.rollout.replica import FOR_TURN, Replica
from relax_hpc.rollout.sample_keeper import SampleKeeper, in_tensorboard
from relax_hpc.rollout.sample_log import SUFFIX, SampleLog
from relax_hpc.rollout.samples import PromptSource
from relax_hpc.tasks import get_task
from relax_hpc.tasks.files import open_evals, open_train
from relax_hpc.training.models.families import route_shape_of_model

FOR_JUDGE = "waiting for the servers of role genrm"
WAITS = (FOR_TURN, FOR_JUDGE)
"""Words for waits, which are no part of a start."""


class Rollout:
    """The replicas of one rank of a rollout group; its ranks know nothing of each other."""

    def __init__(self, context: Context) -> None:
        self.context, self.config, self.client = context, context.config, context.client
        context.report_phase("reading prompts")
        self.tokenizer = load_tokenizer(context.model)
        config = self.config
        self.task = get_task(config.data.task)
        self.train_prompts = open_train(context.run, config, self.tokenizer)
        self.source = PromptSource(self.train_prompts, config)
        self.eval_sets = open_evals(context.run, config, self.tokenizer)
        stops = tuple(self.tokenizer.eos_ids)
        shape = config.rollout
        ev = config.eval
        sampling = Sampling(
            shape.temperature, shape.top_p, stops, config.seed, (), shape.top_k, shape.min_p
        )
        evaluated = Sampling(
            ev.temperature, ev.top_p, stops, config.seed, (), ev.top_k, ev.min_p, is_trained=False
        )
        self.sampling = with_stops(sampling, shape.stop, self.tokenizer)
        self.eval_sampling = with_stops(evaluated, shape.stop, self.tokenizer)
        self.outcomes = Outcomes(shape)
        self.first_failures = FirstFailures()
        path = (
            context.run.samples
            / f"{context.group}-inc-{context.incarnation:06d}-rank-{context.world.rank}{SUFFIX}"
        )
        self.keeping: set[asyncio.Task[None]] = set()
        """Tasks that write down the last puts."""
        log = SampleLog(path, config.samples, config.steps)
        self.samples = SampleKeeper(
            log, config, self.tokenizer, context.run.media, context.run.eval_media
        )
        self.outbox = Outbox(self.put, context.report)
        self.media = PromptMedia(
            self.client, context.model, context.run.eval_media, self.config.data.multimodal
        )
        self.player = player_of(config, self.tokenizer, self.media, self.note_fault, self.note)
        """Player of episodes of several turns; None: an episode is one response, or the task plays
        it."""
        routes = route_shape_of_model(context.model, config.model)
        self.judging = Judge(
            config,
            self.tokenizer,
            self.outbox.report,
            self.samples.keeps,
            routes,
            self.note_waiting_for_judge,
        )
        self.waiting_for_judge = 0
        """Prompt groups that wait for servers of role genrm."""
        world = context.world
        self.pool: EnginePool[Replica] = EnginePool(lambda entry: Replica(self, entry))
        configured = assigned_engines(shape.replicas, world.rank, world.size, world.local_rank)
        self.membership = Membership(context, configured, self.pool)
        self.phases: dict[str, str] = {}
        """Words for what each engine that starts is doing, or what else is waited for, by name."""
        # The hub may be away for long.
        context.report_phase("")
        if context.world.is_leader:
            note_bad_lines(self.client, self.train_prompts)

    def tell(self, name: str, phase: str) -> None:
        """Have beats say what an engine, or another part, is at: of several the first that is at
        anything but a wait."""
        if phase and phase != self.phases.get(name):
            print(f"{name}: {phase}", flush=True)
        self.phases[name] = phase
        found = [phase for _, phase in sorted(self.phases.items()) if phase]
        doing = min(found, key=WAITS.__contains__, default="")
        self.client.beat.set_phase(doing, waits=doing in WAITS)

    def note_fault(self, fault: EnvironmentFault) -> None:
        """Have the queue count the fault of an environment."""
        print(log_entry(f"an environment failed its episode: {fault}"), flush=True)
        self.note("environment_fault", fault.reason)
        self.report_failure(fault.reason, fault.detail, fault.origin)

    def report_program(self, episode: Episode | BadAnswer) -> None:
        """Report the first agent program that has failed after an answer: its episode counts."""
        if failure := failure_of_program(episode):
            self.report_failure("program_failed", *failure)

    def report_failure(self, reason: str, detail: str, origin: ErrorOrigin = NO_ORIGIN) -> None:
        """Report the first failure of each kind in this process to the hub, for people."""
        failure = FirstFailure.from_origin(self.context.group, reason, detail, origin)
        if self.first_failures.is_first(failure):
            texts = failure.detail, failure.location, failure.traceback
            self.client.status.first_failure(failure.reason, *texts)

    def note(self, what: str, reason: str) -> None:
        """Have the queue count ``what`` went wrong."""
        self.client.status.note(what, self.context.group, reason)

    def note_waiting_for_judge(self, change: int) -> None:
        """Have beats say that prompt groups wait for a judge, which is no work that could hang."""
        self.waiting_for_judge += change
        self.tell("rewards", FOR_JUDGE if self.waiting_for_judge else "")

    async def serve(self) -> None:
        """Run the engines until the run is finished; the first failure ends the others."""
        try:
            self.context.report_phase("starting the reward")
            await self.judging.start()
            if self.player:
                self.context.report_phase("starting environments")
                await self.player.start()
            self.context.report_phase("")
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self.membership.follow())
                await self.pool.serve(self.membership.wanted())
                following.cancel()
        finally:
            if self.player:
                await self.player.close()
            await self.judging.close()
            await self.media.close()
            await self.outbox.close()
            await asyncio.gather(*self.keeping, return_exceptions=True)
            self.samples.log.close()

    def over(self) -> None:
        """The run is finished: nobody waits for engines that are still starting."""
        for replica in self.pool.members.values():
            if not replica.started and not self.config.colocate:
                replica.start_leaving()

    async def put(self, rows: list[Row]) -> dict[int, str]:
        """Have the queue take prompt groups, and keep for people what is to be kept of them; what
        was refused."""
        name = self.client.next_shard()
        refused = await asyncio.to_thread(self.client.put_generated, rows, name)
        if kept := [
            row
            for row in rows
            if row["ticket"] not in refused and self.samples.keeps(row["ticket"])
        ]:
            # Nobody waits for it, least of all the next put.
            task = asyncio.create_task(self.keep(kept, name, self.judging.about(kept)))
            self.keeping.add(task)
            task.add_done_callback(self.keeping.discard)
        return refused

    async def keep(
        self, rows: list[Row], shard: str, about: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Keep ``rows`` for people, and tell the hub of a few, and of those that found no room."""
        samples = await asyncio.to_thread(self.samples.put, rows, shard, about)
        step, every = samples[0]["step"], self.config.samples.tensorboard_every
        if every and step % every == 0:
            self.client.status.show(step, in_tensorboard(samples))
        if skipped := self.samples.log.take_skipped():
            self.client.status.report("rollout", step, {SKIPPED: float(skipped)})

    async def judge(
        self, attempt: Attempt, answers: Sequence[Generation | Episode | BadAnswer]
    ) -> list[Row] | Failure:
        """Rows of an attempt, rewards included, or why it came to nothing."""
        judged = await self.judging.rows(attempt.prompt, attempt.ticket, answers)
        self.outcomes.count(judged)
        return judged
