"""Forward, backward and the optimizer step of the policy over all ranks of its group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.algorithms import Algorithm
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.algorithms.losses import MAX_SUFFIX, mean_metrics
from relax_hpc.base.fields import FIELDS
from relax_hpc.config.schema import OptimizerConfig, TrainerConfig
from relax_hpc.training.expert_load import ExpertLoad
from relax_hpc.training.gather_text import gather_texts
from relax_hpc.training.gradients import clip_factor, gradient_norm
from relax_hpc.training.lost_ranks import with_lost_rank_errors
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models import megatron_settings
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.optimizer import build_optimizer, set_rates
from relax_hpc.training.ratio_tail import RatioTail
from relax_hpc.training.reduction import make_reduction

_NONE: Mapping[str, Any] = MappingProxyType({})


class Trainer:
    """Accumulates gradient *sums* over micro-batches and ranks, and divides once, in `step`, by the
    step's weight.

    So micro-batches may be split over calls, ranks and layouts in any way, and a rank may have
    none.
    """

    def __init__(
        self,
        model: PolicyModel,
        algorithm: Algorithm,
        optimizer: OptimizerConfig,
        temperature: float,
        gradients: Mapping[str, Any] = _NONE,
    ) -> None:
        """Take `model`, whose weights are loaded. `gradients`: further settings of megatron-core's
        DistributedDataParallelConfig."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        self.model = model
        self.temperature = temperature
        self.settings = optimizer
        self.algorithm = algorithm
        copies = max(model.layout.dense.copies, model.layout.experts.copies)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=optimizer.distributed,
            # Where one rank has the weights alone there is nothing to wait for.
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
        self._names: list[str] = []
        """Names of the metrics that any rank has ever seen, the same in all ranks."""
        self._zero()

    @classmethod
    def from_settings(
        cls, model: PolicyModel, algorithm: Algorithm, settings: TrainerConfig, temperature: float
    ) -> Self:
        """Make the trainer that ``settings``, the role's section of a run's configuration, ask
        for."""
        gradients = megatron_settings.owner_settings(settings, "gradients")
        return cls(model, algorithm, settings.optimizer, temperature, gradients=gradients)

    @with_lost_rank_errors
    def accumulate(self, micro_batches: Sequence[Batch], last: bool = False) -> None:
        """Run `micro_batches` of this data-parallel rank forward and backward, adding to the
        gradient of the step.

        The ranks of a replica pass the same rows. Any number of calls, also none, makes a step.
        ``last``: no other call follows in it, so that sums over ranks may begin; all ranks say so
        in the same call, whether or not they have rows.
        """
        with self._reduction.passes(last):
            sums = self._run(micro_batches) if micro_batches else []
        for metrics in sums:
            for name, value in metrics.items():
                seen = self._sums.get(name)
                self._sums[name] = (
                    value.double() if seen is None else _combine(name, seen, value.double())
                )

    def _run(self, micro_batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """Metric sums of each, on the ranks of the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(micro_batches),
            model=self.module,
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.shape[1],
            micro_batch_size=micro_batches[0].tokens.shape[0],
        )

    def _forward(self, batches: Iterator[Batch], module: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches)
        return self.model.hidden(batch, module), partial(self._loss_of, batch)

    def _loss_of(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, metrics = self.loss_of(batch, hidden)
        # The count in the middle is for megatron's own division, which is not used; metrics stay on
        # the last stage.
        return loss, torch.zeros((), dtype=torch.int), metrics

    def loss_of(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over a micro-batch, and sums to log, by the last stage's ``hidden``
        states."""
        also = _likeliest_of(batch)
        logprobs, entropies = self.model.token_logprobs(
            hidden, batch, self.temperature, self._measures_entropy, also
        )
        given = token_batch(batch, logprobs, entropies)
        self._ratios.add(given)
        return self.algorithm.loss(given)

    @with_lost_rank_errors
    def step(self, lr: float) -> dict[str, float]:
        """Reduce, divide by the weight, clip, and let Adam step with learning rate `lr`; ready for
        the next step after.

        Collective over all ranks, and all get the same metrics: means over the step's tokens (see
        `mean_metrics`), quantiles of ratios (`RatioTail`), `grad_norm` before clipping, `skipped`
        1.0 if the norm was not finite, and `empty` 1.0 if no token was trained. Either leaves
        weights and optimizer as they were.
        """
        totals = self._reduce_metrics()
        load = self._experts.take()
        totals |= load.sums
        tails = self.tails(totals["tokens"])
        weight = totals["weight"]
        norm = self._gradient_norm(weight)
        is_empty, is_finite = weight <= 0, math.isfinite(norm)
        if is_finite and not is_empty:
            self._update(lr, clip_factor(norm, self.settings.clip_grad) / weight)
        self._zero()
        counts = {"skipped": float(not is_finite), "empty": float(is_empty)}
        return mean_metrics(totals) | load.values | tails | {"grad_norm": norm} | counts

    def tails(self, tokens: float) -> dict[str, float]:
        """Quantiles of old / rollout over the ``tokens`` of a step; see `RatioTail`."""
        return self._ratios.tails(tokens)

    def discard(self) -> None:
        """Forget what was accumulated since the last step. Collective over all ranks."""
        self._reduction.drop()
        self._zero()

    def _gradient_norm(self, weight: float) -> float:
        """Norm of the mean gradient over ``weight``; the sums themselves, reduced over ranks, are
        left as they are."""
        self._reduction.finish()
        self.optimizer.prepare_grads()
        return gradient_norm(self.optimizer, self.model.device) / (weight or 1.0)

    def _update(self, lr: float, scale: float) -> None:
        # Main gradients lie in the same memory as those that are reduced: both are float32.
        self.module.scale_gradients(scale)
        set_rates(self.optimizer, self.settings, lr)
        self.optimizer.step_with_ready_grads()

    def _reduce_metrics(self) -> dict[str, float]:
        """Totals over the step, the same on every rank; a metric that no rank has seen is left
        out."""
        totals, all_known = self._reduced()
        if not all_known:
            seen = gather_texts("\n".join(self._sums), self.model.device)
            self._names = sorted(
                set(self._names).union(*(text.split("\n") for text in seen if text))
            )
            totals, _ = self._reduced()
        return {"weight": 0.0, "tokens": 0.0} | totals

    def _reduced(self) -> tuple[dict[str, float], bool]:
        """Totals of the metrics known by name, and whether no rank has seen another one."""
        from megatron.core import parallel_state

        zero = torch.zeros((), dtype=torch.float64, device=self.model.device)
        sums = torch.stack([*(self._sums.get(name, zero) for name in self._names), zero])
        unknown = not self._sums.keys() <= set(self._names)
        seen = torch.tensor(
            [*(float(name in self._sums) for name in self._names), float(unknown)]
        ).to(sums)
        # Rows: sums, maxima, and whether any rank has the metric; the last column is for what has
        # no name yet.
        table = torch.stack([sums, sums, seen])
        # Context ranks have the same loss, of whole rows, each.
        data = parallel_state.get_data_parallel_group()
        dist.all_reduce(table[0], group=data)
        dist.all_reduce(table[1:], dist.ReduceOp.MAX, group=data)
        # Only the last pipeline stage has seen the loss.
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(table, dist.get_process_group_ranks(pipeline)[-1], group=pipeline)
        *columns, (_, _, any_unknown) = zip(*table.tolist(), strict=True)
        found = zip(self._names, columns, strict=True)
        totals = {
            name: top if name.endswith(MAX_SUFFIX) else total
            for name, (total, top, any_) in found
            if any_
        }
        return totals, not any_unknown

    def _zero(self) -> None:
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._experts.forget()
        self._sums: dict[str, Tensor] = {}
        self._ratios = RatioTail(self.model.device)


def _combine(name: str, left: Tensor, right: Tensor) -> Tensor:
    return torch.maximum(left, right) if name.endswith(MAX_SUFFIX) else left + right


def _likeliest_of(batch: Batch) -> Tensor | None:
    """The teacher's likeliest tokens in the place of each scored one, [n, k] int64, if rows bring
    them."""
    ids = batch.fields.get("teacher_top_ids")
    return None if ids is None else ids.flatten(0, 1).index_select(0, batch.scored.places).long()


def token_batch(batch: Batch, logprobs: Tensor, entropy: Tensor | None) -> TokenBatch:
    """Input of the loss. Rows without old log-probabilities were not trained on yet: their ratio is
    1. Rows without the engine's were sampled by nobody else. ``logprobs`` as
    `PolicyModel.token_logprobs` gives them."""
    own: dict[str, Tensor | None] = {
        "entropy": entropy,
        "mask": batch.mask,
        "episode_tokens": batch.episode_tokens,
    }
    if logprobs.dim() > 2:
        logprobs, own["likeliest"] = logprobs[..., 0], logprobs[..., 1:]
    known = {name: value for name, value in batch.fields.items() if FIELDS[name].loss}
    old = known.setdefault("old_logprobs", logprobs.detach())
    known.setdefault("rollout_logprobs", old)
    return TokenBatch(logprobs=logprobs, **own, **known)
