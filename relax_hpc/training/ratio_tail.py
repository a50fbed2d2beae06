"""Ratios of the old policy's probabilities to the engine's at the tokens where they are farthest
apart."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.algorithms.batch import TokenBatch

QUANTILES = {"train_rollout_ratio_p99": 0.01, "train_rollout_ratio_p999": 0.001}
"""Name of a metric -> share of the step's tokens that exceed it."""

_LARGEST = 20.0
"""Log-ratio beyond which ratios are cut, as in the loss."""


class RatioTail:
    """Ratios old / rollout of a step's tokens, or their inverses, whichever are larger; the largest
    of all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Tensor] = []

    def add(self, batch: TokenBatch) -> None:
        """Add the ratios of a micro-batch. Where nothing is trained on stands a ratio of 1, which
        is in no tail."""
        difference = (batch.old_logprobs - batch.rollout_logprobs).detach().abs().float()
        self._parts.append(torch.where(batch.mask > 0, difference, 0.0).flatten())

    def tails(self, tokens: float) -> dict[str, float]:
        """Exact QUANTILES of a step of so many ``tokens``, in all ranks, which call it together; or
        none, of none."""
        from megatron.core import parallel_state

        if not tokens:
            return {}
        most = {name: max(1, math.ceil(share * tokens)) for name, share in QUANTILES.items()}
        count, mine = max(most.values()), torch.zeros(0, device=self._device)
        if self._parts:
            flat = torch.cat(self._parts)
            mine = flat.topk(min(count, len(flat))).values
        mine = torch.nn.functional.pad(mine, (0, count - len(mine)))
        data = parallel_state.get_data_parallel_group()
        everybody = [torch.empty_like(mine) for _ in range(data.size())]
        dist.all_gather(everybody, mine, group=data)
        ordered = torch.cat(everybody).sort(descending=True).values
        found = ordered[[number - 1 for number in most.values()]]
        # Only the last pipeline stage has seen log-probabilities.
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(found, dist.get_process_group_ranks(pipeline)[-1], group=pipeline)
        return {
            name: math.exp(min(value, _LARGEST))
            for name, value in zip(most, found.tolist(), strict=True)
        }
