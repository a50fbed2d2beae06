"""LoadMetrics of the experts in a step: how evenly tokens chose them, and the loss that keeps that
even."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.training.model import PolicyModel


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """LoadMetrics of the experts in a step, over all ranks; empty for a model without experts."""

    sums: dict[str, float] = field(default_factory=dict)
    """Sum `loss/balance`, as the loss's own metrics."""
    values: dict[str, float] = field(default_factory=dict)
    """Metrics `experts/*`."""


class ExpertLoad:
    """Counter of the load of experts in all layers of a model that is trained, see
    `expert_layer.Router`."""

    def __init__(self, model: PolicyModel, coefficient: float, by_token: bool) -> None:
        """``coefficient``: weight of the balance loss, in which tokens weigh as in the loss."""
        self._spec, self._device = model.spec, model.device
        self._coefficient = coefficient
        if not self._spec.experts:
            self._routers = []
            return
        from relax_hpc.training.models.expert_layer import routers

        self._routers = routers(model.module)
        for router in self._routers:
            router.coefficient, router.by_token = coefficient, by_token

    def take(self) -> LoadMetrics:
        """Take the load since the last time, which begins anew. Collective over all ranks."""
        if not self._spec.experts:
            return LoadMetrics()
        table = torch.zeros(
            self._spec.layers, self._spec.experts + 1, dtype=torch.float64, device=self._device
        )
        for router in self._routers:
            if (counted := router.take()) is not None:
                table[router.layer_number - 1] = counted
        # Each token is counted once in each layer: by one rank of one stage.
        dist.all_reduce(table)
        found = table.cpu()
        sums = {"loss/balance": float(found[:, -1].sum())} if self._coefficient else {}
        return LoadMetrics(sums, _evenness(found[:, :-1]))

    def forget(self) -> None:
        """Forget the load since it was last taken, in this rank."""
        for router in self._routers:
            router.take()


def _evenness(counts: Tensor) -> dict[str, float]:
    """Measures of how even ``counts`` [layers, experts] are, by metric.

    >>> _evenness(torch.tensor([[1.0, 1.0], [2.0, 0.0]]))
    {'experts/load_max': 2.0, 'experts/load_entropy': 0.5}
    """
    experts = counts.shape[1]
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1.0)
    entropies = torch.special.entr(shares).sum(1) / math.log(max(experts, 2))
    return {
        "experts/load_max": float(shares.max()) * experts,
        "experts/load_entropy": float(entropies.mean()),
    }
