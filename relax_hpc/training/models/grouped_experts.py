"""All experts of a rank in one product of matrices, by torch's own grouped kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class GroupedExperts(SequentialMLP):
    """megatron-core's sequential experts, their parameters and their checkpoints, computed
    together.

    Their weights are copied into one piece for each pass through the layer.
    """

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """``permuted_local_hidden_states`` [n, h] in the order of experts, of whom each has so
        many; what they give, weighted by ``permuted_probs`` [n]."""
        tokens = permuted_local_hidden_states
        ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32)
        both = F.grouped_mm(tokens, self._weights("linear_fc1"), offs=ends)
        gate, up = both.chunk(2, -1)
        inner = (F.silu(gate) * up * permuted_probs[:, None]).to(tokens.dtype)
        return F.grouped_mm(inner, self._weights("linear_fc2"), offs=ends), None

    def _weights(self, name: str) -> Tensor:
        """[experts, in, out]"""
        return torch.stack(
            [getattr(expert, name).weight for expert in self.local_experts]
        ).transpose(1, 2)
