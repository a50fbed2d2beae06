"""The actor: a trainer role whose model is the policy, of which it publishes every version."""

from __future__ import annotations

from functools import partial

import torch

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.queue.client import StepTrained
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.storage.media import read_placeholders
from relax_hpc.roles.held_out import HeldOut
from relax_hpc.roles.inner_forward import InnerRoles
from relax_hpc.roles.ranks import Ranks
from relax_hpc.roles.step_report import StepResult, mfu_report, policy_values, staleness_report
from relax_hpc.roles.trainer_role import Beside, TrainerRole
from relax_hpc.roles.window_stream import WindowStream
from relax_hpc.training.device_offload import DeviceOffload
from relax_hpc.training.model import PUBLISHED_TYPES, PolicyModel
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.models.flops import peak_flops
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.published_form import published_form
from relax_hpc.training.simulated_trainer import SimulatedTrainer
from relax_hpc.training.trainer import Trainer
from relax_hpc.training.weights.publisher import Publisher

_TURN = ("rollout", "its turn on the devices")
_COPY = ("actor", "copy of the weights")
_MOVE = ("actor", "its state to the host or back")


class Policy(Beside):
    """Duties of the actor beside its training: weights to publish, forward roles inside of it,
    turns on its devices."""

    def __init__(self, context: Context, ranks: Ranks, model: PolicyModel) -> None:
        self.context, self.config, self.ranks = context, context.config, ranks
        self.spec, self.peak = model.spec, peak_of(model, self.config)
        self.inner = InnerRoles(model, self.config, context.model)
        self.held_out = HeldOut(context, ranks, model) if self.config.algorithm.from_file else None
        """Evaluation of a run in which no engine evaluates."""
        self.trainer = trainer_of(model, self.config)
        self.away: DeviceOffload | None = None
        """Host copy of weights and optimizer while engines have the devices; with `colocate`, from
        `resumed` on."""
        self.publisher = Publisher(
            context.run,
            context.client,
            partial(ranks.channel, self.config.weights.write_timeout_s),
            ranks.reader.planes,
            ranks.pool,
            model.tensors(),
            model.slices(),
            self.config.weights.slabs or self.config.max_staleness + 2,
            self.config.weights,
            self.config.algorithm.kl.refresh_every,
            context.world.local_rank if self.config.model.device == "cuda" else None,
            published_form(model.spec, PUBLISHED_TYPES[model.dtype]),
        )

    def publish(self, number: int, due: bool = False) -> None:
        """Make the present weights version ``number`` of this incarnation, if such a one is
        published, or ``due``."""
        last, weights = number == self.config.steps, self.config.weights
        # Where nobody reads versions, those alone whose files are kept.
        every = weights.keep_every if self.config.algorithm.from_file else weights.publish_every
        if due or last or (every and number % every == 0):
            with self.context.spans("publish", step=number):
                self.publisher.publish(Version(self.context.incarnation, number), last)

    def resumed(self, step: int) -> None:
        """See `Beside`."""
        if self.config.colocate:
            # Not before a checkpoint is loaded, which brings other tensors.
            self.away = DeviceOffload(self.trainer)
        self.publish(step, due=True)
        self.end_step(step)

    def take_turn(self, step: int, windows: WindowStream) -> None:
        """Wait until engines that share the devices have made room."""
        if self.config.colocate:
            windows.ask(step, _TURN, lambda client: client.training.take_turn("actor", step))
            self.come_back()

    def come_back(self) -> None:
        """See `Beside`."""
        if self.away:
            with self.context.spans("wait", cause=_MOVE):
                self.away.restore()

    def rate(self, step: int, lr: float) -> float:
        """See `Beside`; 0 while others learn first, which leaves the weights as they are, bit for
        bit."""
        return lr if self.config.algorithm.trains_policy(step) else 0.0

    def begin_step(self, step: int) -> None:
        """See `Beside`."""
        self.inner.begin_step()

    def prepare(self, step: int, number: int, batches: list[Batch]) -> None:
        """Score the rows by the forward roles inside of the actor."""
        if self.inner.roles:
            with self.context.spans("forward", step=step):
                # The weights to publish are copied from the place where others come now.
                self.publisher.await_copy()
                self.inner.score(number, batches)

    def before_update(self, step: int) -> None:
        """See `Beside`."""
        with self.context.spans("wait", step=step, cause=_COPY):
            self.publisher.await_copy()

    def trained(self, step: int) -> None:
        """See `Beside`."""
        self.publish(step + 1)

    def end_step(self, steps: int) -> None:
        """Evaluate, where no engine does; make room for engines on the same devices."""
        if self.held_out:
            self.held_out.evaluate(steps)
        if self.away:
            self.publisher.await_copy()
            with self.context.spans("wait", cause=_MOVE):
                self.away.offload()
            self.ranks.ask(lambda client: client.training.end_turn())

    def check(self) -> None:
        """See `Beside`."""
        self.publisher.check()

    def settle(self) -> None:
        """See `Beside`."""
        with self.context.spans("publish"):
            self.publisher.settle(self.config.weights.write_timeout_s)

    def values(self, result: StepResult, answer: StepTrained) -> dict[str, float]:
        """See `Beside`."""
        values = (
            result.values() if self.held_out else policy_values(result) | staleness_report(answer)
        )
        values |= mfu_report(
            result,
            self.spec,
            self.config.algorithm.passes,
            self.peak,
            self.config.model.frozen_towers,
        )
        if self.config.weights.anchor_every:
            values["weights/delta_share"] = self.publisher.delta_share()
        return values


def peak_of(model: PolicyModel, config: Config) -> float | None:
    """Operations a second that the devices of all ranks of the actor can do in bfloat16; None: that
    is not known."""
    if (
        model.device.type != "cuda"
        or model.dtype is not torch.bfloat16
        or config.actor.simulated_step_s
    ):
        return None
    one = peak_flops(torch.cuda.get_device_name(model.device))
    return one and one * config.actor.parallel.ranks


def trainer_of(model: PolicyModel, config: Config) -> Trainer:
    """Trainer of ``model``, or one that only takes the time that training is said to take."""
    if config.actor.simulated_step_s:
        return SimulatedTrainer(model, config)
    return Trainer.from_settings(model, config.algorithm, config.actor, config.rollout.temperature)


def run(context: Context) -> None:
    """Train to the last step; asked to stop, or out of time, save at a step's edge."""
    config = context.config
    context.report_phase("meeting its ranks")
    ranks = Ranks(context, config.actor.parallel)
    context.report_phase("loading the model")
    model = PolicyModel(
        read_config(context.model), config.model, config.actor.parallel, config.actor
    )
    model.load_hf(context.model)
    policy = Policy(context, ranks, model)
    TrainerRole(
        context, ranks, config.actor, policy.trainer, policy, read_placeholders(context.model)
    ).run()
