"""A process of a rollout group: it asks for tickets, lets engines generate, computes rewards and
puts whole prompt groups into the queue.

Each engine replica has one task that follows the published weights and others that generate. If an
engine dies, the process ends and the supervisor restarts the group. A single bad response costs one
prompt group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from relax_hpc.base.error_origin import NO_ORIGIN, ErrorOrigin
from relax_hpc.base.metrics.first_failures import FirstFailure, FirstFailures
from relax_hpc.base.metrics.writer import SKIPPED
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.config.groups import group_with_role
from relax_hpc.data.generation import Episode, Generation, Sampling
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.environments.base import EnvironmentFault
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.agents.agents import failure_of_program
from relax_hpc.rollout.attempt import Attempt
from relax_hpc.rollout.bad_row_reports import report_bad_rows
from relax_hpc.rollout.engines.engine import BadAnswer
from relax_hpc.rollout.engines.pool import EnginePool, assigned_engines
from relax_hpc.rollout.engines.stops import with_stops
from relax_hpc.rollout.episodes.player import make_player
from relax_hpc.rollout.external.member import ExternalMember
from relax_hpc.rollout.external.membership import ExternalMembership
from relax_hpc.rollout.group_rewards import GroupRewards
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.rollout.membership import Membership
from relax_hpc.rollout.outbox import Outbox
from relax_hpc.rollout.outcomes import Failure, Outcomes
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.rollout.replica import FOR_TURN, Replica
from relax_hpc.rollout.sample_keeper import SampleKeeper, in_tensorboard
from relax_hpc.rollout.sample_log import SUFFIX, SampleLog
from relax_hpc.tasks import get_task
from relax_hpc.tasks.files import open_evals, open_train
from relax_hpc.training.models.families import route_shape_of_model

FOR_JUDGE = "waiting for the servers of role genrm"
WAITS = (FOR_TURN, FOR_JUDGE)
"""Phases that are waits and not a part of a start."""


class Rollout:
    """The replicas of one rank of a rollout group. The ranks are independent of each other."""

    def __init__(self, context: Context) -> None:
        assert context.client, "each rank of a rollout group has a client"
        self.context, self.config, self.client = context, context.config, context.client
        context.report_phase("reading prompts")
        self.tokenizer = load_tokenizer(context.model)
        config = self.config
        self.task = get_task(config.data.task)
        self.train_prompts = open_train(context.run, config, self.tokenizer)
        self.source = PromptSource(self.train_prompts, config)
        self.eval_sets = open_evals(context.run, config, self.tokenizer)
        rollout = config.rollout
        self._set_sampling()
        self.outcomes = Outcomes(rollout)
        self.first_failures = FirstFailures()
        path = (
            context.run.samples
            / f"{context.group}-inc-{context.incarnation:06d}-rank-{context.world.rank}{SUFFIX}"
        )
        self.storing: set[asyncio.Task[None]] = set()
        """Tasks that store samples of the last puts."""
        log = SampleLog(path, config.samples, config.steps)
        self.samples = SampleKeeper(
            log, config, self.tokenizer, context.run.media, context.run.eval_media
        )
        self.outbox = Outbox(self.put, context.report)
        self.media = PromptMedia(
            self.client, context.model, context.run.eval_media, self.config.data.multimodal
        )
        self.player = make_player(config, self.tokenizer, self.media, self.note_fault, self.note)
        """Player of episodes against environments; None: an episode is one response, or the task
        plays it."""
        routes = route_shape_of_model(context.model, config.model)
        self.group_rewards = GroupRewards(
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
        self.pool: EnginePool[Replica | ExternalMember] = EnginePool(
            lambda engine_id: Replica(self, engine_id)
        )
        configured = assigned_engines(rollout.replicas, world.rank, world.size, world.local_rank)
        self.membership = Membership(context, configured, self.pool)
        self.phases: dict[str, str] = {}
        """Component -> phase of its start, or its wait; empty: neither."""
        # Before the report of bad rows, which waits for the hub.
        context.report_phase("")
        if context.world.is_leader:
            report_bad_rows(self.client, self.train_prompts)

    def _set_sampling(self) -> None:
        rollout, evaluation, seed = self.config.rollout, self.config.eval, self.config.seed
        end_tokens = tuple(self.tokenizer.eos_ids)
        sampling = Sampling(
            rollout.temperature,
            rollout.top_p,
            end_tokens,
            seed,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
        )
        eval_sampling = Sampling(
            evaluation.temperature,
            evaluation.top_p,
            end_tokens,
            seed,
            top_k=evaluation.top_k,
            min_p=evaluation.min_p,
            is_trained=False,
        )
        self.sampling = with_stops(sampling, rollout.stop, self.tokenizer)
        self.eval_sampling = with_stops(eval_sampling, rollout.stop, self.tokenizer)

    def set_phase(self, name: str, phase: str) -> None:
        """Set the phase of an engine or another component. Heartbeats report the first phase that
        is not a wait, or else the first wait."""
        if phase and phase != self.phases.get(name):
            print(f"{name}: {phase}", flush=True)
        self.phases[name] = phase
        self.context.spans.enter_stage("" if phase in WAITS else phase, name)
        phases = [phase for _, phase in sorted(self.phases.items()) if phase]
        reported = min(phases, key=WAITS.__contains__, default="")
        self.client.beat.set_phase(reported, waits=reported in WAITS)

    def note_fault(self, fault: EnvironmentFault) -> None:
        """Report the fault of an environment to the queue, which counts it."""
        print(log_entry(f"an environment failed its episode: {fault}"), flush=True)
        self.note("environment_fault", fault.reason)
        self.report_failure(fault.reason, fault.detail, fault.origin)

    def report_program(self, episode: Episode | BadAnswer) -> None:
        """Report an agent program that has failed after a response. Its episode counts."""
        failure = failure_of_program(episode)
        if failure:
            self.report_failure("program_failed", *failure)

    def report_failure(self, reason: str, detail: str, origin: ErrorOrigin = NO_ORIGIN) -> None:
        """Report a failure to the hub, for people, if it is the first of its kind in this
        process."""
        failure = FirstFailure.from_origin(self.context.group, reason, detail, origin)
        if self.first_failures.is_first(failure):
            texts = failure.detail, failure.location, failure.traceback
            self.client.status.first_failure(failure.reason, *texts)

    def note(self, kind: str, reason: str) -> None:
        """Report an incident of a ``kind`` to the queue, which counts it."""
        self.client.status.note(kind, self.context.group, reason)

    def note_waiting_for_judge(self, change: int) -> None:
        """Report in heartbeats whether prompt groups wait for a judge, which is not a hang."""
        self.waiting_for_judge += change
        self.set_phase("rewards", FOR_JUDGE if self.waiting_for_judge else "")

    async def serve(self) -> None:
        """Run the engines until the run is finished; the first failure ends the others."""
        try:
            self.context.report_phase("starting the reward")
            await self.group_rewards.start()
            if self.player:
                self.context.report_phase("starting environments")
                await self.player.start()
            self.context.report_phase("")
            async with asyncio.TaskGroup() as tasks:
                following = [tasks.create_task(self.membership.follow())]
                if self.takes_external_engines:
                    following.append(tasks.create_task(ExternalMembership(self).follow()))
                await self.pool.serve(self.membership.wanted())
                for task in following:
                    task.cancel()
        finally:
            if self.player:
                await self.player.close()
            await self.group_rewards.close()
            await self.media.close()
            await self.outbox.close()
            await asyncio.gather(*self.storing, return_exceptions=True)
            self.samples.log.close()

    @property
    def takes_external_engines(self) -> bool:
        """Whether external engines join in this process: the first one of the configured group."""
        group = group_with_role(self.config, "rollout")
        is_first = self.context.world.is_leader and self.context.group == group
        return is_first and not self.config.colocate

    @property
    def replicas(self) -> list[Replica]:
        """All replicas of this process. An external engine that is lost has none."""
        replicas = list[Replica]()
        for member in self.pool.members.values():
            if isinstance(member, Replica):
                replicas.append(member)
            elif member.replica:
                replicas.append(member.replica)
        return replicas

    def finish_starting_engines(self) -> None:
        """Let engines leave that are still starting, because the run is finished."""
        for member in list(self.pool.members.values()):
            if not member.started and not self.config.colocate:
                member.start_leaving()

    async def put(self, rows: list[Row]) -> dict[int, str]:
        """Put prompt groups into the queue, and store samples of them. Returns why tickets were
        refused."""
        name = self.client.next_shard()
        refused = await asyncio.to_thread(self.client.put_generated, rows, name)
        selected = [
            row
            for row in rows
            if row["ticket"] not in refused and self.samples.keeps(row["ticket"])
        ]
        if selected:
            # In a task, so that the next put does not wait for it.
            details = self.group_rewards.take_details(selected)
            task = asyncio.create_task(self.store_samples(selected, name, details))
            self.storing.add(task)
            task.add_done_callback(self.storing.discard)
        return refused

    async def store_samples(
        self, rows: list[Row], shard: str, details: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Store samples of ``rows``. Report to the hub a few samples for TensorBoard, and the
        number of samples that did not fit."""
        samples = await asyncio.to_thread(self.samples.put, rows, shard, details)
        step, every = samples[0]["step"], self.config.samples.tensorboard_every
        if every and step % every == 0:
            self.client.status.show(step, in_tensorboard(samples))
        skipped = self.samples.log.take_skipped()
        if skipped:
            self.client.status.report("rollout", step, {SKIPPED: float(skipped)})

    async def make_rows(
        self, attempt: Attempt, answers: Sequence[Generation | Episode | BadAnswer]
    ) -> list[Row] | Failure:
        """Rows of an attempt with their rewards, or the reason why it has none."""
        rows = await self.group_rewards.rows(attempt.prompt, attempt.ticket, answers)
        self.outcomes.count(rows)
        return rows
