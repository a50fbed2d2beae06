"""Largest ratios between the old policy's probabilities and the engine's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.algorithms.batch import TokenBatch

QUANTILES = {"train_rollout_ratio_p99": 0.01, "train_rollout_ratio_p999": 0.001}
"""Name of a metric -> share of the step's tokens with a larger ratio."""

# Log-ratio at which ratios are clipped, as in the loss.
_LARGEST = 20.0


class RatioTail:
    """Quantiles of the larger of old / rollout and rollout / old over a step's tokens of all
    ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._log_ratios: list[Tensor] = []

    def add(self, batch: TokenBatch) -> None:
        """Add the ratios of a micro-batch. Tokens that are not trained count as ratio 1, which is
        in no tail."""
        old, rollout = batch.old_logprobs, batch.rollout_logprobs
        # `trainer.token_batch` sets both.
        assert old is not None and rollout is not None
        difference = (old - rollout).detach().abs().float()
        self._log_ratios.append(torch.where(batch.mask > 0, difference, 0.0).flatten())

    def log_quantiles(self, tokens: float) -> Tensor:
        """Logarithms of the exact QUANTILES of a step with ``tokens`` trained tokens, [2] float32;
        empty without tokens.

        Collective over all ranks. The host does not wait for the device.
        """
        from megatron.core import parallel_state

        if not tokens:
            return torch.zeros(0, device=self._device)
        ranks = [max(1, math.ceil(share * tokens)) for share in QUANTILES.values()]
        count, largest = max(ranks), torch.zeros(0, device=self._device)
        if self._log_ratios:
            flat = torch.cat(self._log_ratios)
            largest = flat.topk(min(count, len(flat))).values
        # The quantile of all ranks is among the largest `count` values of each rank. Padding with
        # 0, a ratio of 1, gives all ranks the same size for the gather.
        largest = torch.nn.functional.pad(largest, (0, count - len(largest)))
        data = parallel_state.get_data_parallel_group()
        gathered = [torch.empty_like(largest) for _ in range(data.size())]
        dist.all_gather(gathered, largest, group=data)
        ordered = torch.cat(gathered).sort(descending=True).values
        # One index each: a list of them would be copied to the device, and the host would wait.
        quantiles = torch.stack([ordered[rank - 1] for rank in ranks])
        # Only the last pipeline stage computes log-probabilities.
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(quantiles, dist.get_process_group_ranks(pipeline)[-1], group=pipeline)
        return quantiles


def tail_metrics(log_quantiles: Sequence[float]) -> dict[str, float]:
    """QUANTILES from the result of `RatioTail.log_quantiles` on the host.

    >>> tail_metrics([0.0, 100.0]) == {
    ...     "train_rollout_ratio_p99": 1.0,
    ...     "train_rollout_ratio_p999": math.exp(20.0),
    ... }
    True
    """
    if not log_quantiles:
        return {}
    pairs = zip(QUANTILES, log_quantiles, strict=True)
    return {name: math.exp(min(value, _LARGEST)) for name, value in pairs}
