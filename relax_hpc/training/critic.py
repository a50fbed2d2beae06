"""The critic: the policy's model with the value of the preceding tokens as output, and its
trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_hpc.algorithms import Algorithm
from relax_hpc.config.schema import ModelConfig
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.models.pieces import FusedParameter
from relax_hpc.training.trainer import Trainer


class ValueHead(torch.nn.Module):
    """Linear layer from a hidden state to one number. It begins with zeros. Every tensor-parallel
    rank has the whole layer."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden, dtype=dtype, device=device))

    def forward(self, states: Tensor) -> Tensor:
        """[n, hidden] -> [n] float32."""
        return states.float() @ self.weight.float()


class CriticModel(PolicyModel):
    """This rank's part of a critic. It loads a policy's weights except the output layer."""

    def __init__(
        self, hf_config: dict[str, Any], model: ModelConfig, *settings: Any, **named: Any
    ) -> None:
        """Arguments as of `PolicyModel`. It has separate experts, which do not use the policy's
        routes."""
        super().__init__(
            hf_config, dataclasses.replace(model, routing_replay="off"), *settings, **named
        )

    def _build(self, first: bool, last: bool) -> Any:
        # The value head cannot be tied to the embedding.
        spec = dataclasses.replace(self.spec, tied=False)
        module: Any = spec.build(self.config, str(self.device), first, last, self.kernels)
        if last:
            module.output_layer = ValueHead(self.spec.hidden, self.dtype, self.device)
        return module

    def _mapped_entries(self, entries: list[FusedParameter]) -> list[FusedParameter]:
        return [entry for entry in entries if not entry.name.startswith("output_layer.")]

    def token_values(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Values before each token of `batch.scored`, from the last stage's hidden states: [b, s]
        float32, 0 elsewhere. Differentiable."""
        from megatron.core.tensor_parallel import mappings

        if self.config.sequence_parallel:
            # Each rank computes all values, and so the whole gradient of the hidden states. It
            # keeps its share; a sum over ranks would be too large.
            hidden = mappings.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._tensor_group
            )
        states = hidden.flatten(0, 1).index_select(0, batch.scored.states)
        values = self.module.output_layer(states)
        return self._sum_over_context(batch.scored.scatter(values, batch.mask.shape))

    def forward_values(self, micro_batches: Sequence[Batch]) -> list[np.ndarray] | None:
        """Values before each row's scored tokens, in order, [its length] float32, on the replica's
        leader; None on other ranks. Collective as `forward_logprobs`."""
        values = self.batch_scores(micro_batches, self.token_values)
        return self.split_by_row(micro_batches, values)


class CriticTrainer(Trainer):
    """Trains a `CriticModel` by the value loss of an algorithm that has one."""

    model: CriticModel

    def __init__(
        self, model: CriticModel, algorithm: Algorithm, *settings: Any, **named: Any
    ) -> None:
        """Arguments as of `Trainer`. The value loss is always a mean over tokens, independent of
        the policy's loss."""
        # A copy, so that the algorithm of the caller keeps its reduction.
        super().__init__(
            model, dataclasses.replace(algorithm, reduction="token_mean"), *settings, **named
        )

    def log_quantiles(self, tokens: float) -> Tensor:
        """No quantiles, because values have no ratios."""
        return torch.zeros(0, device=self.model.device)

    def loss_of(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Trainer.loss_of`. Rows have `values` and `returns`."""
        return self.algorithm.value_loss(
            self.model.token_values(hidden, batch), batch.fields, batch.mask
        )

    def scores(self, batch: Batch, hidden: Tensor) -> Tensor:
        """See `Trainer.scores`: values, [b, s]."""
        return self.model.token_values(hidden, batch)
