"""Sums of a step's metrics, over micro-batches and then over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.algorithms.losses import MAX_SUFFIX
from relax_hpc.training.gather_text import gather_padded
from relax_hpc.training.models.upload import upload

_HEADS = ("weight", "tokens")
"""Metrics whose totals a step needs before it can reduce the others."""


class MetricSums:
    """Sums of metrics by name; maxima if the name ends with `MAX_SUFFIX`.

    Ranks may have different metrics. Names of metrics are exchanged when one of them is new.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Names of all metrics so far except `_HEADS`, equal on all ranks.
        self._names: list[str] = []
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the sums of a micro-batch."""
        for name, value in metrics.items():
            total, added = self._sums.get(name), value.double()
            self._sums[name] = added if total is None else _combine(name, total, added)

    def reset(self) -> None:
        """Discard the sums. The names stay."""
        self._sums.clear()

    def reduce_heads(self) -> dict[str, float]:
        """Totals of weight and tokens, equal on all ranks.

        Collective over all ranks. The host waits for the device once, and once more if a rank has
        a metric with a new name.
        """
        heads = torch.stack([self._sum_of(name) for name in _HEADS])
        new_names = "\n".join(sorted(self._sums.keys() - set(self._names) - set(_HEADS)))
        text = new_names.encode()
        # [1]: bytes of the new names, of which each rank may have others.
        longest = upload(np.array([len(text)], np.float64), self._device)
        data, pipeline = _groups()
        dist.all_reduce(heads, group=data)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=data)
        values = torch.cat([heads, longest])
        _broadcast_from_last_stage(values, pipeline)
        *totals, size = values.tolist()
        if size:
            names = set(self._names)
            for padded in gather_padded(text, int(size), self._device):
                names.update(filter(None, padded.rstrip(b"\0").decode().split("\n")))
            self._names = sorted(names)
        return dict(zip(_HEADS, totals, strict=True))

    def reduce_table(self) -> Tensor:
        """Table of all other metrics, [3, names] float64: sums, maxima, and whether a rank has the
        metric.

        Collective over all ranks, after `reduce_heads`. The host does not wait.
        """
        # The unused last column keeps the table from being empty.
        names = [*self._names, ""]
        sums = torch.stack([self._sum_of(name) for name in names])
        flags = np.array([float(name in self._sums) for name in names])
        table = torch.stack([sums, sums, upload(flags, self._device)])
        # Only over data ranks: context ranks have the same loss, each of whole rows.
        data, pipeline = _groups()
        dist.all_reduce(table[0], group=data)
        dist.all_reduce(table[1:], dist.ReduceOp.MAX, group=data)
        _broadcast_from_last_stage(table, pipeline)
        return table[:, :-1]

    def totals(self, table: Tensor) -> dict[str, float]:
        """Totals in the result of `reduce_table`, on the host. A metric that no rank has is left
        out."""
        totals = {}
        for name, (total, maximum, is_present) in zip(self._names, table.t().tolist(), strict=True):
            if is_present:
                totals[name] = maximum if name.endswith(MAX_SUFFIX) else total
        return totals

    def _sum_of(self, name: str) -> Tensor:
        value = self._sums.get(name)
        return torch.zeros((), dtype=torch.float64, device=self._device) if value is None else value


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy ``tensors`` of one device to the host in one transfer, as float64. The host waits
    once."""
    flat = torch.cat([values.double().flatten() for values in tensors]).cpu()
    parts = flat.split([values.numel() for values in tensors])
    return [part.view(values.shape) for part, values in zip(parts, tensors, strict=True)]


def _groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Data-parallel and pipeline-parallel group of this rank."""
    from megatron.core import parallel_state

    data = parallel_state.get_data_parallel_group()
    return data, parallel_state.get_pipeline_model_parallel_group()


def _broadcast_from_last_stage(values: Tensor, pipeline: dist.ProcessGroup) -> None:
    """Overwrite ``values`` by those of the last pipeline stage, which alone computes the loss."""
    dist.broadcast(values, dist.get_process_group_ranks(pipeline)[-1], group=pipeline)


def _combine(name: str, left: Tensor, right: Tensor) -> Tensor:
    return torch.maximum(left, right) if name.endswith(MAX_SUFFIX) else left + right
