"""Dispatch of tokens to experts that are all on this rank."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor


class LocalDispatcher(MoETokenDispatcher):
    """Tokens in the order of their experts, for a rank that has all experts completely.

    The host never waits for the device. megatron-core 0.16.1's dispatcher copies the numbers of
    tokens of the experts to the host, reads the sizes of two masked selections back from the
    device, and copies all tokens again to sort them by rank. The values are the same.
    """

    _shape: torch.Size
    _by_expert: Tensor
    """Whether an expert computes a token, bool [experts, t]."""
    _tokens: Tensor
    """Token of each row that experts compute, [t * topk] int64."""

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Flatten ``tokens`` [s, b, h] to [t, h]. ``routing_map``, ``probs``: [t, experts]."""
        self._shape = tokens.shape
        self._by_expert = routing_map.t().contiguous()
        return tokens.view(-1, self._shape[-1]), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Do nothing: no other rank has experts."""
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the experts [t * topk, h], in the order of experts and then of tokens; rows of
        each expert [experts]; and the probability of each row [t * topk]."""
        count = len(hidden_states)
        # Each token has `topk` different experts, so the size of the result is known. torch 2.7 and
        # later compute it on a GPU without a wait (pytorch#141838).
        rows = count * self.config.moe_router_topk
        pairs = torch.nonzero_static(self._by_expert.view(-1), size=rows).squeeze(1)
        self._tokens = pairs % count
        row_probs = probs.t().reshape(-1).index_select(0, pairs)
        row_states = hidden_states.index_select(0, self._tokens)
        return row_states, self._by_expert.sum(1), row_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Do nothing: the rows are already in the order in which `combine_postprocess` takes
        them."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Do nothing: no other rank has computed rows."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum the rows of each token, [t * topk, h] -> [s, b, h]."""
        shape = torch.Size((self._by_expert.shape[1], self._shape[-1]))
        return unpermute(hidden_states, self._tokens, restore_shape=shape).view(self._shape)
