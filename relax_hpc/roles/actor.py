"""The actor: a trainer role whose model is the policy. It publishes the versions of the policy."""

from __future__ import annotations

import platform
import re
from functools import partial
from pathlib import Path

import torch

from relax_hpc.base.metrics.length_counts import count_lengths
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.queue.client import StepTrained
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.storage.media import read_placeholders
from relax_hpc.roles.held_out import HeldOut
from relax_hpc.roles.inner_forward import InnerRoles
from relax_hpc.roles.ranks import Ranks
from relax_hpc.roles.step_report import StepResult, mfu_report, policy_values, staleness_report
from relax_hpc.roles.trainer_role import TrainerHooks, TrainerRole
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
from relax_hpc.training.weights.version_digests import VERSIONS_FILE, DigestLog

_TURN = ("rollout", "its turn on the devices")
_COPY = ("actor", "copy of the weights")
_MOVE = ("actor", "its state to the host or back")


class Policy(TrainerHooks):
    """Hooks of the actor: it publishes weights, runs forward roles, and shares its devices."""

    def __init__(self, context: Context, ranks: Ranks, model: PolicyModel) -> None:
        self.context, self.config, self.ranks = context, context.config, ranks
        self.spec, self.peak = model.spec, peak_of(model, self.config)
        self.inner = InnerRoles(model, self.config, context.model)
        self.held_out = HeldOut(context, ranks, model) if self.config.algorithm.from_file else None
        """Evaluation of a run without engines."""
        self.trainer = trainer_of(model, self.config)
        self.offload: DeviceOffload | None = None
        """Host copy of weights and optimizer, used while engines have the devices. With `colocate`
        it exists after `resumed`."""
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
            DigestLog(context.logs / VERSIONS_FILE, device_name(model)) if ranks.leader else None,
        )

    def publish(self, number: int, due: bool = False) -> None:
        """Publish the present weights as version ``number`` of this incarnation if ``due`` is set,
        or if the settings require this version."""
        last, weights = number == self.config.steps, self.config.weights
        # If rows come from files, no process reads versions: publish only those whose files are
        # kept.
        every = weights.keep_every if self.config.algorithm.from_file else weights.publish_every
        if due or last or (every and number % every == 0):
            with self.context.spans("publish", step=number):
                self.publisher.publish(Version(self.context.incarnation, number), last)

    def resumed(self, step: int) -> None:
        """See `TrainerHooks`."""
        if self.config.colocate:
            # A checkpoint replaces tensors, so it must be loaded before this.
            self.offload = DeviceOffload(self.trainer)
        self.publish(step, due=True)
        self.end_step(step)

    def take_turn(self, step: int, windows: WindowStream) -> None:
        """Wait until engines that share the devices have released them."""
        if self.config.colocate:
            windows.ask_queue(step, _TURN, lambda client: client.training.take_turn("actor", step))
            self.restore_state()

    def restore_state(self) -> None:
        """See `TrainerHooks`."""
        if self.offload:
            with self.context.spans("wait", cause=_MOVE):
                self.offload.restore()

    def rate(self, step: int, lr: float) -> float:
        """See `TrainerHooks`. While only the critic learns the rate is 0, which leaves the weights
        unchanged bit for bit."""
        return lr if self.config.algorithm.trains_policy(step) else 0.0

    def begin_step(self, step: int) -> None:
        """See `TrainerHooks`."""
        self.inner.begin_step()

    def prepare(self, step: int, number: int, batches: list[Batch]) -> None:
        """Score the rows with the forward roles inside the actor."""
        if self.inner.roles:
            with self.context.spans("forward", step=step):
                # Scoring overwrites the weights in place, and the publisher may still copy them.
                self.publisher.await_copy()
                self.inner.score(number, batches)

    def before_update(self, step: int) -> None:
        """See `TrainerHooks`."""
        with self.context.spans("wait", step=step, cause=_COPY):
            self.publisher.await_copy()

    def trained(self, step: int) -> None:
        """See `TrainerHooks`."""
        self.publish(step + 1)

    def end_step(self, steps: int) -> None:
        """Evaluate if no engine does. Release the devices if engines share them."""
        if self.held_out:
            self.held_out.evaluate(steps)
        if self.offload:
            self.publisher.await_copy()
            with self.context.spans("wait", cause=_MOVE):
                self.offload.offload()
            self.ranks.ask_queue(lambda client: client.training.end_turn())

    def check(self) -> None:
        """See `TrainerHooks`."""
        self.publisher.check()

    def settle(self) -> None:
        """See `TrainerHooks`."""
        with self.context.spans("publish"):
            self.publisher.settle(self.config.weights.write_timeout_s)

    def values(self, result: StepResult, answer: StepTrained) -> dict[str, float]:
        """See `TrainerHooks`."""
        if self.held_out:
            values = result.values()
        else:
            values = policy_values(result) | staleness_report(answer)
            budget = self.config.rollout.max_new_tokens
            values |= count_lengths("trained", result.tally.lengths, budget)
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
    """Return the bfloat16 operations per second of the devices of all ranks together; None if they
    are unknown."""
    if (
        model.device.type != "cuda"
        or model.dtype is not torch.bfloat16
        or config.actor.simulated_step_s
    ):
        return None
    device_peak = peak_flops(torch.cuda.get_device_name(model.device))
    return device_peak and device_peak * config.actor.parallel.ranks


def device_name(model: PolicyModel) -> str:
    """Return the name of the GPU, or of the processor, that computes ``model``."""
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def trainer_of(model: PolicyModel, config: Config) -> Trainer:
    """Return the trainer of ``model``, or a simulated one that only waits for the configured
    time."""
    if config.actor.simulated_step_s:
        return SimulatedTrainer(model, config)
    return Trainer.from_settings(model, config.algorithm, config.actor, config.rollout.temperature)


def run(context: Context) -> None:
    """Train to the last step. On a stop request or at the time limit, save between two steps."""
    config = context.config
    context.report_phase("connecting its ranks")
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
