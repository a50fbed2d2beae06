"""The actor: trains the policy on the tickets of one step after the other, publishes every version, checkpoints.

It begins where the newest verified checkpoint ends and tells the queue, which gives back or drops what came later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from typing import Any

from relax_hpc.algorithms.correction import effective_share
from relax_hpc.checkpoint import store
from relax_hpc.checkpoint.saver import Saver
from relax_hpc.config.schema import CheckpointConfig, Config
from relax_hpc.errors import DeadlineError, RelaxError, StoppedError
from relax_hpc.models.hf_files import read_config
from relax_hpc.roles.context import HUB, Context
from relax_hpc.roles.inner import InnerRoles
from relax_hpc.roles.prefetch import Prefetch, Window
from relax_hpc.roles.ranks import Ranks
from relax_hpc.training.batches import PAD, Batch, collate
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.optimizer import learning_rate
from relax_hpc.training.simulated_trainer import SimulatedTrainer
from relax_hpc.training.trainer import Trainer
from relax_hpc.transfer_queue.client import Checkpoint, Claim, QueueClient, StepTrained, then
from relax_hpc.transfer_queue.presence import longest_wait_s
from relax_hpc.transfer_queue.row_schema import Row
from relax_hpc.transfer_queue.storage.media import placeholders_of
from relax_hpc.versions import Version
from relax_hpc.weights.publisher import Publisher

_MARGIN = 1.5
"""A step may take so much longer than the longest so far."""
_LOOK_S = 0.2
_WORDS = 500
_DISK = ("disk", "settled on disk")
_TURN = ("rollout", "its turn on the devices")
_COPY = ("actor", "copy of the weights")


class AtEdge(Exception):
    """Training ends at the edge of the step it is at, which has changed nothing yet; the message says why."""


class Actor:
    """One rank of the actor group; `train` runs in all of them, only the leader talks to the queue."""

    def __init__(self, context: Context) -> None:
        self.context, self.config = context, context.config
        context.says("meeting its ranks")
        self.ranks = Ranks(context, self.config.actor.parallel)
        context.says("loading the model")
        model = PolicyModel(read_config(context.model), self.config.model, self.config.actor.parallel)
        model.load_hf(context.model)
        self.model = model
        self.inner = InnerRoles(model, self.config, context.model)
        self.trainer = trainer_of(model, self.config)
        self.publisher = Publisher(
            context.run,
            context.client,
            partial(self.ranks.channel, self.config.weights.write_timeout_s),
            self.ranks.reader.planes,
            self.ranks.pool,
            model.tensors(),
            model.slices(),
            self.config.weights.slabs or self.config.max_staleness + 2,
            self.config.weights,
            self.config.algorithm.kl.refresh_every,
            context.world.local_rank if self.config.model.device == "cuda" else None,
        )
        patience = self.config.checkpoint.timeout_s
        limit, client = self.config.checkpoint.max_failures, context.client
        self.saver = Saver(
            self.trainer,
            self.ranks.channel(patience),
            patience,
            self._note_unsaved,
            limit,
            stands=lambda: client is None or client.beat.hindered,
        )
        self.saved: tuple[int, float] = 0, time.time()
        """The newest step that can be resumed from, and when that was."""
        self.clock = Clock(context.deadline)
        self.prefetch = Prefetch(context, self.ranks, placeholders_of(context.model))
        self.settling: Future | None = None
        """Of the leader, about the rows of the last mini-batch."""
        self.told: Future | None = None
        """Of the leader: {} when the queue has taken the last step for trained, and it is reported."""

    # -- start and end of a step -------------------------------------------------------------------------------

    def resume(self) -> int:
        """Load the newest checkpoint that verifies; the step to begin with (0 without one)."""
        self.context.says("")
        points = self._ask(lambda client: then(client.training.checkpoints(), _messages))
        for point in reversed([Checkpoint(**about) for about in points]):
            directory = self.context.run.checkpoints / point.name
            self.context.says(f"loading checkpoint {point.name}")
            try:
                step = int(store.load(directory, self.trainer, self.ranks.control, point.digest)["step"])
                break
            except store.CheckpointError as error:
                print(f"skipping a checkpoint that does not verify: {error}", flush=True)
        else:
            step = 0
        self.saved = step, time.time()
        self._ask(lambda client: client.training.resume(step))
        self.context.says("")
        self.publish(step, due=True)
        self.end_turn()
        return step

    def _ask(self, ask: Callable[[QueueClient], Future]) -> Any:
        """What the queue answers the leader, in every rank: a message, see `Channel.tell`."""
        return self.ranks.tell(ask(self.context.client) if self.ranks.leader else None)

    def publish(self, number: int, due: bool = False) -> None:
        """Make the present weights version ``number`` of this incarnation, if such a one is published, or ``due``."""
        last = number == self.config.steps
        if due or last or number % self.config.weights.publish_every == 0:
            with self.context.spans("publish", step=number):
                self.publisher.publish(Version(self.context.incarnation, number), last)

    def checkpoint(self, step: int) -> None:
        """Save everything that training step ``step`` needs; what is older than `keep_last` goes once it is saved."""
        with self.context.spans("checkpoint", step=step):
            name = f"i{self.context.incarnation:06d}-step-{step:06d}"
            first = step * self.config.prompts_per_step
            meta = {
                "step": step,
                "first_ticket": first,
                "seed": self.config.seed,
                "incarnation": self.context.incarnation,
            }
            journal = partial(self._journal, step, time.time(), name)
            self.saver.save(self.context.run.checkpoints / name, meta, journal)

    def _journal(self, step: int, at: float, name: str, digest: str) -> None:
        """A checkpoint counts from here on. In the leader's saving thread."""
        client, root = self.context.client, self.context.run.checkpoints
        client.training.checkpoint(step, name, digest).result()
        self.saved, client.beat.unsaved = (step, at), {}
        points = client.training.checkpoints().result()
        store.remove_others(
            root, {point.name for point in kept_points(points, self.config.checkpoint)}, self.context.incarnation
        )

    def _note_unsaved(self, why: str) -> None:
        """In the leader's saving thread."""
        client, (step, at) = self.context.client, self.saved
        client.status.note("checkpoint_unwritten", why, "unwritten")
        client.beat.unsaved = {"step": step, "since": at, "failed": self.saver.failed, "why": why[:_WORDS]}

    def unsaved(self, step: int, saved: int) -> bool:
        """Whether there is something to save at ``step``, ``saved`` being the last that was tried; for all ranks."""
        with self.context.spans("checkpoint", step=step):
            self.saver.wait()
        return self.ranks.tell({"unsaved": step > saved or bool(self.saver.failure)})["unsaved"]

    def settle(self) -> None:
        """Wait for what goes on beside training."""
        with self.context.spans("publish"):
            self.publisher.settle(self.config.weights.write_timeout_s)
        with self.context.spans("checkpoint"):
            self.saver.settle()

    def check_edge(self) -> None:
        """AtEdge, in every rank, if another step must not begin."""
        if reason := self.ranks.tell({"reason": self._why_end()})["reason"]:
            raise AtEdge(reason)

    def _why_end(self) -> str:
        return self.clock.reason(self.context.stop.is_set())

    # -- training ----------------------------------------------------------------------------------------------

    def train(self, step: int) -> bool:
        """One training step: all its passes and mini-batches, then the new version; whether it was checkpointed."""
        started = time.monotonic()
        algorithm, minis = self.config.algorithm, self.config.algorithm.mini_batches
        lr = learning_rate(self.config.actor.optimizer, step, self.config.steps)
        leases: list[int] = []
        tally = Tally()
        mini_batches: list[list[list[Batch]]] = []
        self.inner.begin_step()
        for number in range(minis):
            claims, windows = self.gradients(step, number, tally)
            self.await_told(step)
            with self.context.spans("wait", step=step, cause=_COPY):
                self.publisher.await_copy()
            with self.context.spans("train", step=step):
                metrics = self.trainer.step(lr)
            leases += [claim.lease for claim in claims]
            mini_batches.append(windows)
            if number == 0:
                first = metrics
        with self.context.spans("train", step=step):
            for _ in range(algorithm.passes - 1):
                for windows in mini_batches:
                    self.trainer.accumulate([batch for window in windows for batch in window])
                    metrics = self.trainer.step(lr)
        self.publish(step + 1)
        if self.ranks.leader:
            values = report(first, metrics, tally, lr, time.monotonic() - started)
            answer = self.context.client.training.trained(step, leases)
            self.told = then(answer, partial(self._report, step, values))
        due = (step + 1) % self.config.checkpoint.every == 0 or step + 1 == self.config.steps
        if due:
            self.await_told(step)
            self.checkpoint(step + 1)
        return due

    def _report(self, step: int, values: dict[str, float], answer: StepTrained) -> dict[str, Any]:
        values |= staleness_report(answer)
        values |= {"perf/unsaved_steps": step + 1 - self.saved[0], "perf/unsaved_checkpoints": self.saver.failed}
        if self.config.weights.anchor_every:
            values["weights/delta_share"] = self.publisher.delta_share()
        self.context.report(step, values | self.ranks.reader.ways.since_last())
        return {}

    def await_told(self, step: int) -> None:
        """At step ``step``, in every rank: nothing more is changed or saved before the queue knows of the last step.

        Ranks that went on alone would wait in a collective of the next work, whose deadline no full disk and no hub
        that is away puts off.
        """
        with self.context.spans("wait", step=step, cause=_DISK):
            self.ranks.tell((self.told or {}) if self.ranks.leader else None)

    def gradients(self, step: int, number: int, tally: Tally) -> tuple[list[Claim], list[list[Batch]]]:
        """Gather the gradient of mini-batch ``number`` from rows that nothing can take away any more.

        Rows are trained on before they are on disk. What is lost with its maker until then costs a gradient, which is
        gathered again, and no change of the weights has to be undone.
        """
        while True:
            claims: list[Claim] = []
            windows: list[list[Batch]] = []
            found = Tally()
            for window in self.windows(step, number):
                claims.append(window.claim)
                with self.context.spans("train", step=step):
                    found.add(window.rows)
                    windows.append(self.batches(window))
                if self.config.actor.parallel.pipeline == 1:
                    self.learn(step, number, windows[-1])
            if self.config.actor.parallel.pipeline > 1:
                self.learn(step, number, [batch for window in windows for batch in window])
            if self.settled(step, claims):
                tally.join(found)
                return claims, windows
            self.trainer.discard()
            self.give_back(step, number, claims)

    def learn(self, step: int, number: int, batches: list[Batch]) -> None:
        """Add what ``batches`` of mini-batch ``number`` say to the gradient, in the first pass."""
        if self.inner.roles:
            with self.context.spans("forward", step=step):
                # The weights to publish are copied from the place where others come now.
                self.publisher.await_copy()
                self.inner.score(number, batches)
        with self.context.spans("train", step=step):
            self.trainer.accumulate(batches)

    def settled(self, step: int, claims: list[Claim]) -> bool:
        """Whether all rows of ``claims``, which `windows` has asked about, are on disk; if not, some were lost."""
        with self.context.spans("wait", step=step, cause=_DISK):
            held = self.ranks.tell(self.settling if self.ranks.leader else None)
        return len(held) == sum(len(claim.tickets) for claim in claims)

    def give_back(self, step: int, number: int, claims: list[Claim]) -> None:
        """Hold nothing of mini-batch ``number`` any more, nor what was asked for last: it may be of this one too."""
        for claim in claims:
            self._release(claim)
        if self.prefetch.asked:
            self._release(self._take(step, may_end=number == 0).claim)

    def _release(self, claim: Claim) -> None:
        self._ask(lambda client: client.release(claim))

    def windows(self, step: int, number: int) -> Iterator[Window]:
        """The windows of mini-batch ``number`` in ticket order, each as soon as its rows are there.

        While one is trained on, the next is fetched, though it be another step's. With the last one the queue is
        asked whether all rows are on disk.
        """
        minis = self.config.algorithm.mini_batches
        size = self.config.prompts_per_step // minis
        first = step * self.config.prompts_per_step + number * size
        leases: list[int] = []
        tickets: set[int] = set()
        if not self.prefetch.asked:
            self.prefetch.ask(0)
        while len(tickets) < size:
            # Beyond the first update it is too late to leave the step out.
            window = self._take(step, may_end=number == 0)
            leases.append(window.claim.lease)
            check_range(window.claim, first, size)
            # A ticket whose rows were lost since it was claimed may come again.
            tickets.update(window.claim.tickets)
            if len(tickets) < size:
                self.prefetch.ask(len(leases))
            else:
                if step + 1 < self.config.steps or number + 1 < minis:
                    self.prefetch.ask(0)
                if self.ranks.leader:
                    self.settling = self.context.client.training.settled(leases)
            yield window

    def _take(self, step: int, may_end: bool) -> Window:
        """The window that was asked for, in every rank; AtEdge if the actor has to end before, and ``may_end``."""
        asked = self.prefetch.asked
        with self.context.spans("wait", step=step, cause=HUB) as waiting:
            reason = self._wait(asked, may_end) if self.ranks.leader else ""
            if reason := self.ranks.tell({"reason": reason})["reason"]:
                raise AtEdge(reason)
            window = asked.result()
            waiting.because(window.claim.waited)
        self.prefetch.taken()
        return window

    def _wait(self, work: Future, may_end: bool) -> str:
        """Wait for an answer of the queue, in the leader; why the actor has to end before, if it ``may_end``."""
        patience, client = self.config.queue.wait_timeout_s, self.context.client
        longest, until, stood = longest_wait_s(self.config), time.monotonic() + patience, client.beat.stood_s
        while not wait([work], timeout=_LOOK_S).done:
            # While somebody is not there, the clock stands.
            if time.monotonic() > until + min(client.beat.stood_s - stood, longest):
                text = (
                    f"no rows to train on came for {patience:g} s; see relax-hpc status, and the logs of the group that"
                )
                raise DeadlineError(f"{text} is behind in {self.context.run.root / 'logs'}")
            self.ranks.control.still_waits()
            # What goes wrong there may be why nothing comes.
            self.publisher.check()
            self.saver.check()
            if may_end and (reason := self._why_end()):
                return reason
        return ""

    def take_turn(self, step: int) -> None:
        """Wait until engines that share the devices have made room; AtEdge if the actor has to end before."""
        if not self.config.colocate:
            return
        reason = ""
        with self.context.spans("wait", step=step, cause=_TURN):
            if self.ranks.leader:
                work = self.context.client.training.take_turn("actor", step)
                if not (reason := self._wait(work, may_end=True)):
                    work.result()
            reason = self.ranks.tell({"reason": reason})["reason"]
        if reason:
            raise AtEdge(reason)

    def end_turn(self) -> None:
        """Make room for engines on the same devices."""
        if self.config.colocate:
            self.publisher.await_copy()
            self._ask(lambda client: client.training.end_turn())

    def batches(self, window: Window) -> list[Batch]:
        """This data rank's micro-batches of a window, as the queue has assigned them."""
        assigned = window.claim.assignment[self.ranks.layout.data_rank]
        parts = [[window.rows[number] for number in part] for part in assigned]
        return [collate(part, PAD, self.model.device, self.model.length_multiple) for part in parts]


def _messages(points: list[Checkpoint]) -> list[dict[str, Any]]:
    return [asdict(point) for point in points]


def check_range(claim: Claim, first: int, size: int) -> None:
    """RelaxError unless ``claim`` is of the ``size`` tickets from ``first`` on, which are trained on now."""
    if claim.tickets[0] < first or claim.tickets[-1] >= first + size:
        found = f"tickets {claim.tickets[0]} to {claim.tickets[-1]}"
        raise RelaxError(
            f"claim: found {found}, expected those of {first} to {first + size - 1}; the actor starts again"
        )


def trainer_of(model: PolicyModel, config: Config) -> Trainer:
    """What trains ``model``, or takes the time that this is said to take."""
    if config.actor.simulated_step_s:
        return SimulatedTrainer(model, config)
    return Trainer(model, config.algorithm, config.actor.optimizer, config.rollout.temperature)


class Tally:
    """What the step's rows say, for the metrics."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.stopped = 0
        self.tokens = 0

    def add(self, rows: list[Row]) -> None:
        for row in rows:
            self.rewards.append(float(row["reward"]))
            self.lengths.append(len(row["token_ids"]) - int(row["prompt_len"]))
            self.tokens += len(row["token_ids"])
            self.stopped += row["finish_reason"] == "stop"

    def join(self, other: Tally) -> None:
        """Count what ``other`` has counted too."""
        self.rewards += other.rewards
        self.lengths += other.lengths
        self.stopped += other.stopped
        self.tokens += other.tokens


def staleness_report(answer: StepTrained) -> dict[str, float]:
    """Scalars of what the queue says of a step: how old its tokens were, how far behind readers are."""
    staleness = answer.staleness
    return {
        "staleness/min": min(staleness),
        "staleness/mean": sum(staleness) / len(staleness),
        "staleness/max": max(staleness),
        "weights/publish_lag": max(0, answer.lag),
    }


def report(
    first: dict[str, float], last: dict[str, float], tally: Tally, lr: float, seconds: float
) -> dict[str, float]:
    """Scalars of a step. The comparison of rollout and old log-probs is the first pass's, before any update.

    `parity/*` is how far the two engines that computed the same log-probs are apart, in nats: no KL.
    """
    count = len(tally.rewards)
    renamed = {
        "ratio": "loss/ratio",
        "clip_fraction": "loss/clip_fraction",
        "entropy": "loss/entropy_nats",
        "grad_norm": "loss/grad_norm",
        "skipped": "loss/skipped_updates",
    }
    values = {renamed.get(name, name): value for name, value in last.items() if "/" in renamed.get(name, name)}
    mean = sum(tally.rewards) / count
    values |= {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in tally.rewards) / count) ** 0.5,
        "reward/response_tokens": sum(tally.lengths) / count,
        "reward/stopped_share": tally.stopped / count,
        "parity/logprob_abs_diff": first.get("train_rollout_logprob_abs_diff", 0.0),
        "parity/logprob_max": first.get("train_rollout_logprob_max", 0.0),
        "kl/rollout": first.get("rollout_kl", 0.0),
        **correction_report(first),
        "loss/lr": lr,
        "perf/step_s": seconds,
        "perf/trained_tokens": tally.tokens,
    }
    return values


def correction_report(metrics: dict[str, float]) -> dict[str, float]:
    """How far the engine's policy was from the old one, and what the off-policy correction made of it.

    `correction/effective_share`: of as many tokens by the old policy itself, those that would say as much.
    """
    inverse = metrics.get("rollout_inverse_ratio_max", 0.0)
    weight = metrics.get("correction_weight", 0.0)
    return {
        "correction/weight": weight,
        "correction/cut_share": metrics.get("correction_cut", 0.0),
        "correction/effective_share": effective_share(weight, metrics.get("correction_square", 0.0)),
        "correction/ratio_min": 1.0 / inverse if inverse else 0.0,
        "correction/ratio_max": metrics.get("rollout_ratio_max", 0.0),
    }


def kept_points(points: list[Checkpoint], config: CheckpointConfig) -> list[Checkpoint]:
    """The checkpoints that stay: the last ones, and every so-manyth.

    >>> points = [Checkpoint(step=step, incarnation=1, name=f"c{step}", digest="") for step in (10, 20, 30, 40)]
    >>> [point.step for point in kept_points(points, CheckpointConfig(keep_last=1, keep_every=20))]
    [20, 40]
    """
    every = config.keep_every
    return [p for p in points[: -config.keep_last] if every and not p.step % every] + points[-config.keep_last :]


class Clock:
    """Whether the time limit leaves room for another step and its checkpoint, by the longest ones so far."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline, self.step_s, self.save_s = deadline, 0.0, 0.0

    def room(self) -> bool:
        """Whether to start another step; true while nothing was measured."""
        return self.deadline is None or time.time() + _MARGIN * (self.step_s + self.save_s) < self.deadline

    def reason(self, stop: bool) -> str:
        """Why to end at this step's edge; empty: go on."""
        return "asked to stop" if stop else "" if self.room() else "the time limit leaves no room for a step"


def run(context: Context) -> None:
    """Train to the last step; asked to stop, or out of time, save at a step's edge."""
    actor = Actor(context)
    clock = actor.clock
    step = saved = actor.resume()
    try:
        while step < context.config.steps:
            actor.check_edge()
            actor.take_turn(step)
            started = time.monotonic()
            trained_only = not actor.train(step)
            actor.end_turn()
            seconds = time.monotonic() - started
            clock.step_s, clock.save_s = max(clock.step_s, seconds), max(clock.save_s, actor.saver.seconds)
            step += 1
            if not trained_only:
                saved = step
    except AtEdge as edge:
        actor.await_told(step)
        if actor.unsaved(step, saved):
            actor.checkpoint(step)
        actor.settle()
        # The others end only after the leader's last work.
        actor.ranks.tell({})
        raise StoppedError(f"{edge}: saved step {step}") from None
    actor.settle()
    actor.ranks.close()
