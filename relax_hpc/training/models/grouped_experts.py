"""All experts of a rank in one matrix product, by torch's grouped kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


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
        ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32)
        gate_up = F.grouped_mm(tokens, self._weights("linear_fc1"), offs=ends)
        gate, up = gate_up.chunk(2, -1)
        inner = (F.silu(gate) * up * permuted_probs[:, None]).to(tokens.dtype)
        return F.grouped_mm(inner, self._weights("linear_fc2"), offs=ends), None

    def _weights(self, name: str) -> Tensor:
        """[experts, in, out]"""
        weights = [getattr(expert, name).weight for expert in self.local_experts]
        return torch.stack(weights).transpose(1, 2)
