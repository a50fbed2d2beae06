"""The trainer role: claims the rows of one step after the other, trains on them, settles them and
checkpoints.

It knows no policy: what goes on beside it (weights that are published, forward passes, turns on
shared devices) it calls at the points where that belongs, see `Beside`. It begins where the newest
verified checkpoint ends and tells the queue, which gives back or drops what came later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from relax_hpc.base.errors import StoppedError
from relax_hpc.config.groups import trainers_of
from relax_hpc.config.schema import TrainerConfig
from relax_hpc.queue.client import Claim, StepTrained, then
from relax_hpc.queue.process_context import Context
from relax_hpc.roles.checkpoints import Checkpoints
from relax_hpc.roles.prefetch import Window
from relax_hpc.roles.ranks import Ranks
from relax_hpc.roles.route_watch import RouteWatch
from relax_hpc.roles.step_clock import AtEdge, StepClock
from relax_hpc.roles.step_report import StepResult, Tally
from relax_hpc.roles.window_stream import DISK, Aside, WindowStream
from relax_hpc.training.models.batches import Batch, collate_parts, episode_tokens
from relax_hpc.training.optimizer import learning_rate
from relax_hpc.training.trainer import Trainer

_OTHERS = ("trainers", "their last step")


class Beside(Aside):
    """Duties of a trainer role beside its training: none here. Every method is called in every
    rank."""

    def resumed(self, step: int) -> None:
        """Called when the model is as before training step ``step``."""

    def take_turn(self, step: int, windows: WindowStream) -> None:
        """Called before the time of ``step`` counts; `windows.ask` waits for an answer of the
        queue."""

    def rate(self, step: int, lr: float) -> float:
        """Learning rate of ``step``, of which the schedule says ``lr``."""
        return lr

    def begin_step(self, step: int) -> None:
        """Called before the first update of ``step``."""

    def prepare(self, step: int, number: int, batches: list[Batch]) -> None:
        """Called before the gradient of ``batches``, of mini-batch ``number`` in its first pass;
        may add fields to them."""

    def before_update(self, step: int) -> None:
        """Called before weights change."""

    def trained(self, step: int) -> None:
        """Called when all updates of ``step`` are made."""

    def end_step(self, steps: int) -> None:
        """Called when so many ``steps`` are done, and the checkpoint of the last is begun if one is
        due."""

    def come_back(self) -> None:
        """Weights and optimizer are to be saved: have them where they belong."""

    def check(self) -> None:
        """Raise what has gone wrong."""

    def settle(self) -> None:
        """Called when the role ends: wait for what still goes on."""

    def values(self, result: StepResult, answer: StepTrained) -> dict[str, float]:
        """Scalars of a step, whose ``answer`` is the queue's to `trained`; in the leader alone."""
        return result.values()


class TrainerRole:
    """One rank of a group that trains; every method runs in all of them, only the leader talks to
    the queue."""

    def __init__(
        self,
        context: Context,
        ranks: Ranks,
        settings: TrainerConfig,
        trainer: Trainer,
        beside: Beside,
        placeholders: Mapping[str, int],
    ) -> None:
        """``settings``: the role's section of the configuration. ``placeholders``: see
        `check_media`."""
        self.context, self.config, self.ranks = context, context.config, ranks
        self.settings, self.trainer, self.beside = settings, trainer, beside
        self.checkpoints = Checkpoints(context, ranks, trainer)
        self.clock = StepClock(context.deadline)
        self.windows = WindowStream(
            context, ranks, self.clock, settings, placeholders, self.check, beside
        )
        self.route_watch = RouteWatch(context, ranks, trainer.model)
        self.alone = len(trainers_of(self.config.groups)) == 1
        """Whether no other role of the run trains."""
        self.told: Future | None = None
        """Answer to the leader when the queue has taken the last step for trained, and it is
        reported: {"save_next": whether the next step ends with a checkpoint because
        `checkpoint.every_s` is over}."""

    def run(self) -> None:
        """Train to the last step; asked to stop, or out of time, save at a step's edge."""
        step = saved = self.checkpoints.load()
        self.beside.resumed(step)
        try:
            while step < self.config.steps:
                self.check_edge()
                self.beside.take_turn(step, self.windows)
                started = time.monotonic()
                if self.train(step):
                    saved = step + 1
                self.beside.end_step(step + 1)
                self.clock.took(time.monotonic() - started, self.checkpoints.saver.seconds)
                step += 1
            self.settle()
            self.await_others()
        except AtEdge as edge:
            self.await_told(step)
            if self.checkpoints.unsaved(step, saved):
                self.beside.come_back()
                self.checkpoints.save(step)
            self.settle()
            # The others end only after the leader's last work.
            self.ranks.tell({})
            raise StoppedError(f"{edge}: saved step {step}") from None
        self.ranks.close()

    def await_others(self) -> None:
        """Wait until all trainers have saved the last step: one that had left could not go back
        with the policy."""
        last, seen = self.config.steps, -1
        while not self.alone:
            whole, seen = self.windows.ask(
                last, _OTHERS, lambda client, seen=seen: client.training.whole(last, seen)
            )
            if whole:
                break

    def check_edge(self) -> None:
        """Raise AtEdge, in every rank, if another step must not begin."""
        if reason := self.ranks.tell({"reason": self.windows.why_end()})["reason"]:
            raise AtEdge(reason)

    def check(self) -> None:
        """Raise what goes wrong beside training."""
        self.beside.check()
        self.checkpoints.saver.check()

    def settle(self) -> None:
        """Wait for what goes on beside training."""
        self.beside.settle()
        self.checkpoints.settle()

    # -- a step ------------------------------------------------------------------------------------

    def train(self, step: int) -> bool:
        """All passes and mini-batches of one training step; whether it was checkpointed."""
        started, passes, minis = (
            time.monotonic(),
            self.config.algorithm.passes,
            self.config.algorithm.mini_batches,
        )
        lr = self.beside.rate(step, learning_rate(self.settings.optimizer, step, self.config.steps))
        leases: list[int] = []
        tally = Tally()
        mini_batches: list[list[list[Batch]]] = []
        updates: list[dict[str, float]] = []
        is_timed_save = False
        self.beside.begin_step(step)
        for number in range(minis):
            claims, windows = self.gradients(step, number, tally)
            is_timed_save = self.await_told(step)
            self.beside.before_update(step)
            with self.context.spans("train", step=step):
                updates.append(self.trainer.step(lr))
            leases += [claim.lease for claim in claims]
            mini_batches.append(windows)
        with self.context.spans("train", step=step):
            for _ in range(passes - 1):
                for windows in mini_batches:
                    self.trainer.accumulate(
                        [batch for window in windows for batch in window], last=True
                    )
                    updates.append(self.trainer.step(lr))
        self.context.has_worked = True
        self.beside.trained(step)
        if self.trainer.model.spec.towers:
            tally.gather(self.ranks.control)
        if self.ranks.leader:
            result = StepResult(updates, minis, tally, lr, time.monotonic() - started)
            answer = self.context.client.training.trained(step, leases, self.context.role)
            self.told = then(answer, partial(self._report, step, result))
        is_step_save = (step + 1) % self.config.checkpoint.every == 0
        due = is_timed_save or is_step_save or step + 1 == self.config.steps
        if due:
            self.await_told(step)
            self.checkpoints.save(step + 1)
        return due

    def _report(self, step: int, result: StepResult, answer: StepTrained) -> dict[str, Any]:
        values = self.beside.values(result, answer) | self.checkpoints.values(step)
        self.context.report(step, values | self.ranks.reader.plane_counts.take_metrics())
        return {"save_next": answer.save_next}

    def await_told(self, step: int) -> bool:
        """Wait, in every rank: nothing more is changed or saved before the queue knows of the last
        step that was trained; whether the step after that ends with a checkpoint because time
        requires one.

        Ranks that went on alone would wait in a collective of the next work, whose deadline no full
        disk and no hub that is away puts off.
        """
        with self.context.spans("wait", step=step, cause=DISK):
            answer = self.ranks.tell((self.told or {}) if self.ranks.leader else None)
        return answer.get("save_next", False)

    def gradients(
        self, step: int, number: int, tally: Tally
    ) -> tuple[list[Claim], list[list[Batch]]]:
        """Gather the gradient of mini-batch ``number`` from rows that nothing can take away any
        more.

        Rows are trained on before they are on disk. What is lost with its maker until then costs a
        gradient, which is gathered again, and no change of the weights has to be undone. So is one
        of rows with routes of others.
        """
        pipeline = self.settings.parallel.pipeline > 1
        while True:
            computed: list[tuple[Window, list[Batch]]] = []
            found = Tally()
            for window in self.windows.of(step, number):
                with self.context.spans("train", step=step):
                    found.add(window.rows, window.media)
                    computed.append((window, self.batches(window)))
                if not pipeline:
                    self.learn(step, number, computed[-1][1], window.last)
            if pipeline:
                self.learn(
                    step, number, [batch for _, batches in computed for batch in batches], last=True
                )
            claims = [window.claim for window, _ in computed]
            if self.windows.settled(step, claims) and self.route_watch.agree(computed, found):
                tally.join(found)
                return claims, [batches for _, batches in computed]
            self.trainer.discard()
            self.windows.give_back(step, number, claims)

    def learn(self, step: int, number: int, batches: list[Batch], last: bool) -> None:
        """Add what ``batches`` of mini-batch ``number``, maybe its ``last``, say to the gradient,
        in the first pass."""
        self.beside.prepare(step, number, batches)
        with self.context.spans("train", step=step):
            self.trainer.accumulate(batches, last)

    def batches(self, window: Window) -> list[Batch]:
        """Micro-batches of a window for this data rank, as the queue has assigned them."""
        assigned, model = window.claim.assignment[self.ranks.layout.data_rank], self.trainer.model
        split, also = model.pack_split, model.row_fields
        tokens = episode_tokens(window.rows)
        return collate_parts(window.rows, assigned, model.device, split, also, tokens, window.media)
