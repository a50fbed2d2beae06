"""Layers of experts: megatron-core's, whose routers know what each token is worth, and count what
they choose."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relax_hpc.training.models.grouped_experts import GroupedExperts
from relax_hpc.training.models.replay import RoutedLayer, Routes


class ExpertLayer(MoELayer):
    """Layer of experts: megatron-core's, without shared experts. Its `padding_mask` is no mask: see
    `Router`."""

    replay: RoutedLayer | None = None
    """Holder of the routes of the present micro-batch, if it has some; see
    `relax_hpc.training.models.replay`."""

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """[t, 1, h] -> the same shape, and no bias. ``padding_mask`` [1, t]: `Batch.shares`."""
        shares = None if padding_mask is None else self._own(padding_mask.flatten(), hidden_states)
        compute = partial(self._compute, self.replay and self.replay.routes)
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(compute, False, hidden_states, shares), None
        return compute(hidden_states, shares), None

    def _own(self, shares: Tensor, hidden_states: Tensor) -> Tensor:
        """Shares of this rank's tokens; under sequence parallelism only the first pipeline stage
        has them cut."""
        size = hidden_states.shape[0]
        return (
            shares if len(shares) == size else shares.narrow(0, self.tp_group.rank() * size, size)
        )

    def _compute(
        self, routes: Routes | None, hidden_states: Tensor, shares: Tensor | None
    ) -> Tensor:
        if self.replay:
            # Computed again, it comes after other micro-batches, which had their own.
            self.replay.routes = routes
        probs, chosen = self.route(hidden_states, shares)
        tokens, probs = self.preprocess(hidden_states, probs, chosen)
        results, _ = self.routed_experts_compute(*self.dispatch(tokens, probs))
        return self.postprocess(self.combine(results), None)


class Router(TopKRouter):
    """Router of tokens to experts: megatron-core's, with a balance loss for gradients that are
    summed and divided once.

    Of a micro-batch with T tokens, of which f_i T k chose expert i, whose probabilities have the
    mean P_i, it is coefficient * w * E * sum_i f_i P_i (Fedus et al., arXiv 2101.03961, equation
    4), w being the micro-batch's weight in the loss: the step's division by all weights leaves a
    weighted mean. Padding takes no part.
    """

    coefficient = 0.0
    by_token = True
    """Whether a trained token weighs 1 in the loss, and not its share of its episode."""
    counted: Tensor | None = None
    """Tokens of this rank that chose each expert, and its part of the loss, float64 [E + 1], since
    they were last taken."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``padding_mask`` [t]: `Batch.shares`; None: nothing is counted, as where nothing is
        learned."""
        probs, chosen = super().routing(logits)
        if padding_mask is None or not torch.is_grad_enabled():
            return probs, chosen
        real = padding_mask >= 0
        counts = (chosen & real[:, None]).sum(0)
        loss = logits.new_zeros((), dtype=torch.float32)
        if self.coefficient:
            weight = (padding_mask > 0).sum() if self.by_token else padding_mask.clamp(min=0).sum()
            loss = self._balance_loss(logits.flatten(0, 1), real, counts, weight)
            probs = MoEAuxLossAutoScaler.apply(probs, loss)
        self._count(counts, loss.detach())
        return probs, chosen

    def _balance_loss(self, logits: Tensor, real: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
        """Balance loss of this rank's tokens, its part of the sum; ``logits`` [t, E]."""
        whole = torch.cat([counts.float(), real.sum().float()[None], weight.float()[None]])
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(whole, group=self.tp_cp_group)
        tokens = whole[-2].clamp(min=1)
        chosen = whole[:-2] / (tokens * self.topk)
        mean = (logits.float().softmax(-1) * real[:, None]).sum(0) / tokens
        return self.coefficient * whole[-1] * len(counts) * (chosen * mean).sum()

    def _count(self, counts: Tensor, loss: Tensor) -> None:
        found = torch.cat([counts.double(), loss.double()[None]])
        self.counted = found if self.counted is None else self.counted + found

    def take(self) -> Tensor | None:
        """Take what was `counted`, which begins anew."""
        found, self.counted = self.counted, None
        return found


def routers(module: torch.nn.Module) -> list[Router]:
    """Routers of all layers of this stage."""
    return [one for one in module.modules() if isinstance(one, Router)]


def put_experts(layer: Any, grouped: bool) -> None:
    """Have the layers that are made of the spec ``layer`` be these, with experts that are
    ``grouped`` or not."""
    submodules = layer.submodules.mlp.submodules
    submodules.router = Router
    if grouped:
        submodules.experts.module = GroupedExperts

    class Layer(ExpertLayer):
        # A spec of a class that it does not know makes megatron-core warn.
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config, submodules)

    layer.submodules.mlp = Layer
