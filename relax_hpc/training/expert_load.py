"""Load of the experts in a step: how evenly tokens chose them, and the balance loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.training.model import PolicyModel


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Load of the experts in a step, over all ranks; empty for a model without experts."""

    sums: dict[str, float] = field(default_factory=dict)
    """Sum of `loss/balance`, in the form of the loss's other metrics."""
    values: dict[str, float] = field(default_factory=dict)
    """Metrics `experts/*`."""


class ExpertLoad:
    """Counts the load of experts in all layers of a trained model; see `expert_layer.Router`."""

    def __init__(self, model: PolicyModel, coefficient: float, by_token: bool) -> None:
        """``coefficient``: weight of the balance loss. ``by_token``: see `Router`."""
        self._spec, self._device = model.spec, model.device
        self._coefficient = coefficient
        if not self._spec.experts:
            self._routers = []
            return
        from relax_hpc.training.models.expert_layer import routers

        self._routers = routers(model.module)
        for router in self._routers:
            router.coefficient, router.by_token = coefficient, by_token

    def collect(self) -> Tensor:
        """Counts since the last call, which resets them, and the balance loss of each layer,
        [layers, experts + 1] float64; empty for a model without experts.

        Collective over all ranks. The host does not wait for the device.
        """
        if not self._spec.experts:
            return torch.zeros(0, 1, dtype=torch.float64, device=self._device)
        table = torch.zeros(
            self._spec.layers, self._spec.experts + 1, dtype=torch.float64, device=self._device
        )
        for router in self._routers:
            counted = router.take_counts()
            if counted is not None:
                table[router.layer_number - 1] = counted
        # Each token is counted once in each layer, by one rank of one stage.
        dist.all_reduce(table)
        return table

    def metrics(self, totals: Tensor) -> LoadMetrics:
        """Metrics of the result of `collect`, on the host."""
        if not self._spec.experts:
            return LoadMetrics()
        sums = {"loss/balance": float(totals[:, -1].sum())} if self._coefficient else {}
        return LoadMetrics(sums, _evenness(totals[:, :-1]))

    def reset(self) -> None:
        """Reset the counts of this rank."""
        for router in self._routers:
            router.take_counts()


def _evenness(counts: Tensor) -> dict[str, float]:
    """Metrics of the distribution ``counts`` [layers, experts].

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
