"""Layers of experts: megatron-core's layers, with routers that weigh tokens as the loss does, and
that count the chosen experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_default_pg_collection,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relax_hpc.training.models.expert_dispatch import LocalDispatcher
from relax_hpc.training.models.replay import RoutedLayer, Routes
from relax_hpc.training.models.upload import upload


class ExpertLayer(MoELayer):
    """megatron-core's layer of experts, without shared experts. Its `padding_mask` contains weights
    of tokens; see `Router`."""

    replay: RoutedLayer | None = None
    """Routes of the layer, if the run has some; see `relax_hpc.training.models.replay`."""

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """[t, 1, h] -> the same shape, and no bias. ``padding_mask`` [1, t]: `Batch.shares`."""
        shares = None
        if padding_mask is not None:
            shares = self._rank_shares(padding_mask.flatten(), hidden_states)
        compute = partial(self._compute, self.replay.routes if self.replay else None)
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(compute, False, hidden_states, shares), None
        return compute(hidden_states, shares), None

    def _rank_shares(self, shares: Tensor, hidden_states: Tensor) -> Tensor:
        """Shares of this rank's tokens.

        Under sequence parallelism, megatron-core 0.16.1 splits the mask only in the first pipeline
        stage.
        """
        size = hidden_states.shape[0]
        if len(shares) == size:
            return shares
        return shares.narrow(0, self.tp_group.rank() * size, size)

    def _compute(
        self, routes: Routes | None, hidden_states: Tensor, shares: Tensor | None
    ) -> Tensor:
        if self.replay:
            # A recomputed pass comes after other micro-batches, which have set their own routes.
            self.replay.routes = routes
        probs, chosen = self.route(hidden_states, shares)
        tokens, probs = self.preprocess(hidden_states, probs, chosen)
        results, _ = self.routed_experts_compute(*self.dispatch(tokens, probs))
        return self.postprocess(self.combine(results), None)


class Router(TopKRouter):
    """megatron-core's router, with a balance loss for gradients that are summed over micro-batches
    and divided once.

    The loss of a micro-batch is coefficient * w * E * sum_i f_i P_i (Fedus et al., arXiv
    2101.03961, equation 4). T tokens choose k experts each, f_i T k of them expert i. P_i is the
    mean of its probabilities. w is the micro-batch's weight in the loss, so that the step's
    division by the sum of weights gives a weighted mean. Padding is excluded.
    """

    coefficient = 0.0
    by_token = True
    """Whether a trained token weighs 1 in the loss. If not, it weighs its share of its episode."""
    counted: Tensor | None = None
    """Tokens of this rank that chose each expert, and this rank's part of the loss, float64 [E +
    1], since the last `take_counts`."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and choice of experts. ``padding_mask`` [t]: `Batch.shares`.

        Without a mask or without gradients, nothing is counted.
        """
        probs, chosen = super().routing(logits)
        if padding_mask is None or not torch.is_grad_enabled():
            return probs, chosen
        # `Batch.shares` is -1 for padding.
        real = padding_mask >= 0
        counts = (chosen & real[:, None]).sum(0)
        loss = logits.new_zeros((), dtype=torch.float32)
        if self.coefficient:
            weight = (padding_mask > 0).sum() if self.by_token else padding_mask.clamp(min=0).sum()
            loss = self._balance_loss(logits.flatten(0, 1), real, counts, weight)
            # An identity of the probabilities. Its backward pass adds the gradient of the loss.
            probs = MoEAuxLossAutoScaler.apply(probs, loss)
        self._count(counts, loss.detach())
        return probs, chosen

    def _balance_loss(self, logits: Tensor, real: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
        """This rank's part of the balance loss; ``logits`` [t, E]."""
        # Tensor and context ranks have different tokens of the same micro-batch. One collective
        # sums the counts of the experts, the tokens and the weight.
        totals = torch.cat([counts.float(), real.sum().float()[None], weight.float()[None]])
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(totals, group=self.tp_cp_group)
        tokens = totals[-2].clamp(min=1)
        chosen = totals[:-2] / (tokens * self.topk)
        mean = (logits.float().softmax(-1) * real[:, None]).sum(0) / tokens
        return self.coefficient * totals[-1] * len(counts) * (chosen * mean).sum()

    def _count(self, counts: Tensor, loss: Tensor) -> None:
        new = torch.cat([counts.double(), loss.double()[None]])
        self.counted = new if self.counted is None else self.counted + new

    def take_counts(self) -> Tensor | None:
        """Return `counted`, and reset it."""
        counted, self.counted = self.counted, None
        return counted


class GroupedExperts(SequentialMLP):
    """megatron-core's sequential experts, computed together. Parameters and checkpoints are the
    same.

    Each pass through the layer copies the weights into one tensor.
    """

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Results of the experts [n, h], weighted by ``permuted_probs`` [n].

        ``permuted_local_hidden_states``: [n, h] in the order of experts. ``tokens_per_expert``:
        [experts].
        """
        tokens = permuted_local_hidden_states
        # torch's kernel takes the end of each expert's tokens as int32.
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        if ends.device != tokens.device:
            # Ranks that share experts exchange numbers of tokens through the host.
            ends = upload(ends.numpy(), tokens.device)
        gate_up = F.grouped_mm(tokens, self._weights("linear_fc1"), offs=ends)
        gate, up = gate_up.chunk(2, -1)
        inner = (F.silu(gate) * up * permuted_probs[:, None]).to(tokens.dtype)
        return F.grouped_mm(inner, self._weights("linear_fc2"), offs=ends), None

    def _weights(self, name: str) -> Tensor:
        """[experts, in, out]"""
        weights = [getattr(expert, name).weight for expert in self.local_experts]
        return torch.stack(weights).transpose(1, 2)


def routers(module: torch.nn.Module) -> list[Router]:
    """Routers of all layers of this stage."""
    return [child for child in module.modules() if isinstance(child, Router)]


def put_experts(layer: Any, grouped: bool) -> None:
    """Use `ExpertLayer` in the layer spec ``layer``, with ``grouped`` experts or single ones."""
    submodules = layer.submodules.mlp.submodules
    submodules.router = Router
    if grouped:
        submodules.experts.module = GroupedExperts

    class BoundExpertLayer(ExpertLayer):
        # megatron-core 0.16.1 warns about a spec with an unknown class, so the submodules are bound
        # here instead of in a spec.
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config, submodules)
            groups = get_default_pg_collection()
            is_local = groups.ep.size() == groups.expt_tp.size() == 1
            if is_local and not config.moe_permute_fusion:
                self.token_dispatcher: Any = LocalDispatcher(config, groups)

    layer.submodules.mlp = BoundExpertLayer
