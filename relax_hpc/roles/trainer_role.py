"""The trainer role: for each step it claims rows, trains on them, acknowledges them to the queue,
and saves checkpoints.

It has no code that only a policy needs, such as publishing weights, forward passes and turns on
shared devices. That code is in hooks, see `TrainerHooks`. The role begins after the newest verified
checkpoint and reports that step to the queue, which gives back or drops later rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any

from relax_hpc.base.errors import StoppedError
from relax_hpc.base.old_attribute import OldAttribute
from relax_hpc.config.groups import groups_that_train
from relax_hpc.config.schema import TrainerConfig
from relax_hpc.queue.client import Claim, QueueClient, StepTrained, then
from relax_hpc.queue.process_context import Context
from relax_hpc.roles.checkpoints import Checkpoints
from relax_hpc.roles.prefetch import Window
from relax_hpc.roles.profiling import StepProfiler
from relax_hpc.roles.ranks import Ranks
from relax_hpc.roles.route_watch import RouteWatch
from relax_hpc.roles.step_clock import StepClock, StopBeforeStep
from relax_hpc.roles.step_report import StepResult, StepTally
from relax_hpc.roles.window_stream import DISK, IdleWork, WindowStream
from relax_hpc.training.models.batches import Batch, collate_parts, count_episode_tokens
from relax_hpc.training.optimizer import learning_rate
from relax_hpc.training.trainer import Trainer
from relax_hpc.training.warm_up import connect_ranks, warm_up_batches

_OTHERS = ("trainers", "their last step")


class TrainerHooks(IdleWork):
    """Hooks around a training step. The default does nothing. Every hook is called in every
    rank."""

    def resumed(self, step: int) -> None:
        """Called when the model has the state before training step ``step``."""

    def take_turn(self, step: int, windows: WindowStream) -> None:
        """Called before the time of ``step`` is measured. `windows.ask_queue` waits for an answer
        of the queue."""

    def rate(self, step: int, lr: float) -> float:
        """Return the learning rate of ``step``; ``lr`` is that of the schedule."""
        return lr

    def begin_step(self, step: int) -> None:
        """Called before the first update of ``step``."""

    def prepare(self, step: int, number: int, batches: list[Batch]) -> None:
        """Called before the gradient of ``batches``, of mini-batch ``number`` in its first pass. It
        may add fields to the batches."""

    def before_update(self, step: int) -> None:
        """Called before an update changes the weights."""

    def trained(self, step: int) -> None:
        """Called after all updates of ``step``."""

    def end_step(self, steps: int) -> None:
        """Called when ``steps`` steps are done, after the checkpoint of the last step was started
        if it was due."""

    def restore_state(self) -> None:
        """Called before weights and optimizer are saved: move them to their device."""

    def check(self) -> None:
        """Raise errors of background work."""

    def settle(self) -> None:
        """Called when the role ends: wait for background work."""

    def values(self, result: StepResult, answer: StepTrained) -> dict[str, float]:
        """Return the scalars of a step. ``answer`` is the queue's answer to `trained`. It is called
        in the leader only."""
        return result.values()


Beside = TrainerHooks  # Name in release 0.1.


class TrainerRole:
    """One rank of a group that trains. Every method runs in all ranks; only the leader talks to the
    queue."""

    beside = OldAttribute("hooks")
    told = OldAttribute("step_ack")

    def __init__(
        self,
        context: Context,
        ranks: Ranks,
        settings: TrainerConfig,
        trainer: Trainer,
        hooks: TrainerHooks,
        placeholders: Mapping[str, int],
    ) -> None:
        """``settings`` is the role's section of the configuration. For ``placeholders`` see
        `check_media`."""
        self.context, self.config, self.ranks = context, context.config, ranks
        self.settings, self.trainer, self.hooks = settings, trainer, hooks
        self.checkpoints = Checkpoints(context, ranks, trainer)
        self.clock = StepClock(context.deadline)
        self.profiler = StepProfiler(context)
        self.windows = WindowStream(
            context, ranks, self.clock, settings, placeholders, self.check, hooks
        )
        self.route_watch = RouteWatch(context, ranks, trainer.model)
        self.is_only_trainer = len(groups_that_train(self.config.groups)) == 1
        self.step_ack: Future | None = None
        """Acknowledgement of the last step, in the leader: {"save_next": whether the next step ends
        with a checkpoint because of `checkpoint.every_s`}. It is done when the queue has recorded
        the step as trained, and the metrics are sent."""

    def run(self) -> None:
        """Train to the last step. On a stop request or at the time limit, save between two
        steps."""
        self.warm_up()
        step = saved = self.checkpoints.load()
        self.hooks.resumed(step)
        try:
            while step < self.config.steps:
                self.check_edge()
                self.profiler.reach(step)
                self.hooks.take_turn(step, self.windows)
                started = time.monotonic()
                if self.train(step):
                    saved = step + 1
                self.hooks.end_step(step + 1)
                self.clock.record(time.monotonic() - started, self.checkpoints.saver.seconds)
                step += 1
            self.profiler.close()
            self.settle()
            self.await_other_trainers()
        except StopBeforeStep as stop:
            self.profiler.close()
            self.await_step_ack(step)
            if self.checkpoints.needs_save(step, saved):
                self.hooks.restore_state()
                self.checkpoints.save(step)
            self.settle()
            # The other ranks may end only after the leader has finished its work.
            self.ranks.tell({})
            raise StoppedError(f"{stop}: saved step {step}") from None
        self.ranks.close()

    def warm_up(self) -> None:
        """Compile kernels and connect the ranks before the first step, while other groups still
        count this one as loading (`Spans.is_starting`)."""
        if not self.settings.warm_up:
            return
        self.context.report_phase("warming up kernels and connections")
        model = self.trainer.model
        connect_ranks(model.device)
        self.trainer.warm_up(warm_up_batches(model, self.settings.pack_tokens))

    def await_other_trainers(self) -> None:
        """Wait until all trainers have saved the last step. A trainer that has ended could not
        resume together with the policy."""
        last, known_step = self.config.steps, -1
        while not self.is_only_trainer:

            def whole(client: QueueClient, known_step: int = known_step) -> Future:
                return client.training.whole(last, known_step)

            is_whole, known_step = self.windows.ask_queue(last, _OTHERS, whole)
            if is_whole:
                break

    def check_edge(self) -> None:
        """Raise StopBeforeStep, in every rank, if no further step may begin."""
        reason = self.ranks.tell({"reason": self.windows.stop_reason()})["reason"]
        if reason:
            raise StopBeforeStep(reason)

    def check(self) -> None:
        """Raise errors of background work."""
        self.hooks.check()
        self.checkpoints.saver.check()

    def settle(self) -> None:
        """Wait for background work."""
        self.hooks.settle()
        self.checkpoints.settle()

    # -- one step ----------------------------------------------------------------------------------

    def train(self, step: int) -> bool:
        """Run all passes and mini-batches of one training step. Return whether a checkpoint was
        saved."""
        started = time.monotonic()
        passes, minis = self.config.algorithm.passes, self.config.algorithm.mini_batches
        lr = self.hooks.rate(step, learning_rate(self.settings.optimizer, step, self.config.steps))
        leases: list[int] = []
        tally = StepTally()
        mini_batches: list[list[list[Batch]]] = []
        updates: list[dict[str, float]] = []
        is_timed_save = False
        self.hooks.begin_step(step)
        for number in range(minis):
            claims, windows = self.gradients(step, number, tally)
            is_timed_save = self.await_step_ack(step)
            self.hooks.before_update(step)
            with self.context.spans("train", step=step):
                updates.append(self.trainer.step(lr))
            leases += [claim.lease for claim in claims]
            mini_batches.append(windows)
        with self.context.spans("train", step=step):
            for _ in range(passes - 1):
                for windows in mini_batches:
                    batches = list(chain.from_iterable(windows))
                    self.trainer.accumulate(batches, last=True)
                    updates.append(self.trainer.step(lr))
        self.context.has_worked = True
        self.hooks.trained(step)
        if self.trainer.model.spec.towers:
            tally.gather(self.ranks.control)
        if self.ranks.leader:
            result = StepResult(updates, minis, tally, lr, time.monotonic() - started)
            assert self.context.client is not None
            answer = self.context.client.training.trained(step, leases, self.context.role)
            self.step_ack = then(answer, partial(self._report, step, result))
        is_step_save = (step + 1) % self.config.checkpoint.every == 0
        due = is_timed_save or is_step_save or step + 1 == self.config.steps
        if due:
            self.await_step_ack(step)
            self.checkpoints.save(step + 1)
        return due

    def _report(self, step: int, result: StepResult, answer: StepTrained) -> dict[str, Any]:
        values = self.hooks.values(result, answer) | self.checkpoints.values(step)
        self.context.report(step, values | self.ranks.reader.plane_counts.take_metrics())
        return {"save_next": answer.save_next}

    def await_step_ack(self, step: int) -> bool:
        """Wait in every rank until the queue has recorded the last trained step. Nothing is changed
        or saved before. Return whether the next step ends with a checkpoint because of its time.

        All ranks must wait here. A rank that continued alone would wait in the next collective,
        whose timeout does not stop while a disk is full or the hub is replaced.
        """
        with self.context.spans("wait", step=step, cause=DISK):
            answer = self.ranks.tell((self.step_ack or {}) if self.ranks.leader else None)
        return answer.get("save_next", False)

    def gradients(
        self, step: int, number: int, tally: StepTally
    ) -> tuple[list[Claim], list[list[Batch]]]:
        """Accumulate the gradient of mini-batch ``number`` from rows that can no longer be lost.

        Rows are trained on before they are on disk. If rows are lost with the process that created
        them, the gradient is discarded and accumulated again, and no change of the weights has to
        be undone. The same happens with rows whose routes are not the trainer's.
        """
        pipeline = self.settings.parallel.pipeline > 1
        while True:
            computed: list[tuple[Window, list[Batch]]] = []
            step_tally = StepTally()
            for window in self.windows.take_windows(step, number):
                with self.context.spans("train", step=step):
                    step_tally.add(window.rows, window.media)
                    computed.append((window, self.batches(window)))
                if not pipeline:
                    self.learn(step, number, computed[-1][1], window.last)
            if pipeline:
                all_batches = list(chain.from_iterable(batches for _, batches in computed))
                self.learn(step, number, all_batches, last=True)
            claims = [window.claim for window, _ in computed]
            if self.windows.settled(step, claims) and self.route_watch.agree(computed, step_tally):
                tally.merge(step_tally)
                return claims, [batches for _, batches in computed]
            self.trainer.discard()
            self.windows.give_back(step, number, claims)

    def learn(self, step: int, number: int, batches: list[Batch], last: bool) -> None:
        """Add the gradient of ``batches`` of mini-batch ``number`` in the first pass. ``last``:
        they are the last of the mini-batch."""
        self.hooks.prepare(step, number, batches)
        with self.context.spans("train", step=step):
            self.trainer.accumulate(batches, last)

    def batches(self, window: Window) -> list[Batch]:
        """Return the micro-batches of a window for this data rank, as the queue has assigned
        them."""
        assigned, model = window.claim.assignment[self.ranks.layout.data_rank], self.trainer.model
        tokens = count_episode_tokens(window.rows)
        return collate_parts(
            window.rows,
            assigned,
            model.device,
            model.pack_split,
            model.row_fields,
            tokens,
            window.media,
        )
