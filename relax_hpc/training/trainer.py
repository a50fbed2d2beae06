"""Forward pass, backward pass and optimizer step of the policy over all ranks of its group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from relax_hpc.algorithms import Algorithm
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.algorithms.losses import mean_metrics
from relax_hpc.base.fields import FIELDS
from relax_hpc.config.schema import OptimizerConfig, TrainerConfig
from relax_hpc.training.expert_load import ExpertLoad
from relax_hpc.training.gradients import clip_factor, squared_gradient_norm
from relax_hpc.training.lost_ranks import with_lost_rank_errors
from relax_hpc.training.metric_sums import MetricSums, copy_to_host
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models import megatron_settings
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.optimizer import build_optimizer, set_rates
from relax_hpc.training.ratio_tail import RatioTail, tail_metrics
from relax_hpc.training.reduction import make_reduction

_NONE: Mapping[str, Any] = MappingProxyType({})


class Trainer:
    """Accumulates gradient *sums* over micro-batches and ranks. `step` divides once by the step's
    weight.

    So micro-batches may be distributed over calls, ranks and layouts in any way, and a rank may
    have none.
    """

    def __init__(
        self,
        model: PolicyModel,
        algorithm: Algorithm,
        optimizer: OptimizerConfig,
        temperature: float,
        gradients: Mapping[str, Any] = _NONE,
    ) -> None:
        """`model`: with loaded weights. `gradients`: further settings of megatron-core's
        DistributedDataParallelConfig."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        self.model = model
        self.temperature = temperature
        self.settings = optimizer
        self.algorithm = algorithm
        copies = max(model.layout.dense.copies, model.layout.experts.copies)
        settings = DistributedDataParallelConfig(
            # Gradients are summed over many micro-batches, which bfloat16 would round each time.
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=optimizer.distributed,
            # A single copy of the weights needs no sum, so there is nothing to overlap.
            overlap_grad_reduce=optimizer.overlap_gradients and copies > 1,
            **gradients,
        )
        self.module = DistributedDataParallel(model.config, settings, model.module)
        self._reduction = make_reduction(self.module)
        self.optimizer = build_optimizer(
            optimizer, self.module, model.dtype, model.kernels == "fused"
        )
        self._experts = ExpertLoad(
            model, algorithm.balance_coefficient, algorithm.reduction == "token_mean"
        )
        self._measures_entropy = algorithm.needs_entropy or (
            model.entropy_is_free and not algorithm.from_file
        )
        self._sums = MetricSums(model.device)
        self._reset_sums()

    @classmethod
    def from_settings(
        cls, model: PolicyModel, algorithm: Algorithm, settings: TrainerConfig, temperature: float
    ) -> Self:
        """Build from ``settings``, the role's section of a run's configuration."""
        gradients = megatron_settings.owner_settings(settings, "gradients")
        return cls(model, algorithm, settings.optimizer, temperature, gradients=gradients)

    @with_lost_rank_errors
    def accumulate(self, micro_batches: Sequence[Batch], last: bool = False) -> None:
        """Run `micro_batches` of this data-parallel rank forward and backward, and add to the
        gradient of the step.

        The ranks of a replica pass the same rows. A step has any number of calls, also none.
        ``last``: no other call follows in the step, so that sums over ranks may begin. All ranks
        set it in the same call, with or without rows.
        """
        with self._reduction.passes(last):
            sums = self._run(micro_batches, self._forward) if micro_batches else []
        for metrics in sums:
            self._sums.add(metrics)

    @with_lost_rank_errors
    def warm_up(self, micro_batches: Sequence[Batch]) -> None:
        """Run ``micro_batches`` forward and backward, and discard their gradient. Weights,
        optimizer and random states stay as they are. Collective over all ranks."""
        with self._reduction.passes(False):
            self._run(micro_batches, self._warm_forward)
        self.discard()

    def _run(
        self, micro_batches: Sequence[Batch], forward: Callable[..., Any]
    ) -> list[dict[str, Tensor]]:
        """Metric sums of each micro-batch, on the ranks of the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=self.module,
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.shape[1],
            micro_batch_size=micro_batches[0].tokens.shape[0],
        )

    def _forward(self, batches: Iterator[Batch], module: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches)
        return self.model.hidden(batch, module), partial(self._loss_of, batch)

    def _warm_forward(
        self, batches: Iterator[Batch], module: torch.nn.Module
    ) -> tuple[Tensor, Any]:
        batch = next(batches)
        # The rows have no routes of an engine.
        return self.model.hidden(batch, module, False), partial(self._warm_loss, batch)

    def _warm_loss(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return self.scores(batch, hidden).sum(), torch.zeros((), dtype=torch.int), {}

    def scores(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Input of the loss, from the last stage's ``hidden`` states: log-probabilities, [b, s].
        Differentiable."""
        return self.model.token_logprobs(hidden, batch, self.temperature, self._measures_entropy)[0]

    def _loss_of(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, metrics = self.loss_of(batch, hidden)
        # megatron-core would divide by the count in the middle, which is disabled by
        # `calculate_per_token_loss`. Metrics stay on the last stage.
        return loss, torch.zeros((), dtype=torch.int), metrics

    def loss_of(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss summed over a micro-batch, and sums of metrics, from the last stage's ``hidden``
        states."""
        teacher_ids = _teacher_ids(batch)
        logprobs, entropies = self.model.token_logprobs(
            hidden, batch, self.temperature, self._measures_entropy, teacher_ids
        )
        inputs = token_batch(batch, logprobs, entropies)
        self._ratios.add(inputs)
        return self.algorithm.loss(inputs)

    @with_lost_rank_errors
    def step(self, lr: float) -> dict[str, float]:
        """Reduce gradients, divide by the weight, clip, and do an Adam step with learning rate
        `lr`.

        Collective over all ranks. All ranks return the same metrics: means over the step's tokens
        (see `mean_metrics`), quantiles of ratios (`RatioTail`), and `grad_norm` before clipping.
        `skipped` is 1.0 if the norm was not finite, `empty` is 1.0 if no token was trained. In both
        cases weights and optimizer stay unchanged.
        """
        heads = self._sums.reduce_heads()
        weight = heads["weight"]
        # The host waits for the device twice in a step: above, and here for everything else.
        table, load_table, log_quantiles, square = copy_to_host(
            [
                self._sums.reduce_table(),
                self._experts.collect(),
                self.log_quantiles(heads["tokens"]),
                self._squared_gradient_norm(),
            ]
        )
        load = self._experts.metrics(load_table)
        totals = heads | self._sums.totals(table) | load.sums
        tails = tail_metrics(log_quantiles.tolist())
        norm = math.sqrt(square.item()) / (weight or 1.0)
        is_empty, is_finite = weight <= 0, math.isfinite(norm)
        # All ranks have the same norm and weight, so all of them skip the same updates.
        if is_finite and not is_empty:
            self._update(lr, clip_factor(norm, self.settings.clip_grad) / weight)
        self._reset_sums()
        counts = {"skipped": float(not is_finite), "empty": float(is_empty)}
        return mean_metrics(totals) | load.values | tails | {"grad_norm": norm} | counts

    def log_quantiles(self, tokens: float) -> Tensor:
        """Quantiles of log(old / rollout) over the ``tokens`` of a step; see `RatioTail`."""
        return self._ratios.log_quantiles(tokens)

    def discard(self) -> None:
        """Discard the gradients since the last step. Collective over all ranks."""
        self._reduction.discard()
        self._reset_sums()

    def _squared_gradient_norm(self) -> Tensor:
        """Square of the norm of the gradient's sum, [] float64. It reduces the sums over ranks."""
        self._reduction.finish()
        self.optimizer.prepare_grads()
        return squared_gradient_norm(self.optimizer, self.model.device)

    def _update(self, lr: float, scale: float) -> None:
        # This scales the main gradients too: both are float32 and share memory.
        self.module.scale_gradients(scale)
        set_rates(self.optimizer, self.settings, lr)
        self.optimizer.step_with_ready_grads()

    def _reset_sums(self) -> None:
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._experts.reset()
        self._sums.reset()
        self._ratios = RatioTail(self.model.device)


def _teacher_ids(batch: Batch) -> Tensor | None:
    """The teacher's likeliest alternatives of each scored token, [n, k] int64; None: rows have
    none."""
    ids = batch.fields.get("teacher_top_ids")
    if ids is None:
        return None
    return ids.flatten(0, 1).index_select(0, batch.scored.positions).long()


def token_batch(batch: Batch, logprobs: Tensor, entropy: Tensor | None) -> TokenBatch:
    """Inputs of the loss. ``logprobs``: result of `PolicyModel.token_logprobs`.

    Rows without old log-probabilities were not trained yet, so their ratio is 1. Rows without the
    engine's log-probabilities count as sampled from the old policy.
    """
    fields: dict[str, Any] = {
        name: value for name, value in batch.fields.items() if FIELDS[name].loss
    }
    if logprobs.dim() > 2:
        logprobs, fields["likeliest"] = logprobs[..., 0], logprobs[..., 1:]
    old = fields.setdefault("old_logprobs", logprobs.detach())
    fields.setdefault("rollout_logprobs", old)
    return TokenBatch(
        logprobs=logprobs,
        entropy=entropy,
        mask=batch.mask,
        episode_tokens=batch.episode_tokens,
        **fields,
    )
