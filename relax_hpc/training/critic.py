"""The critic: the policy's model with a value of what is before each token for an output, and how
it learns."""

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
    """Head that makes one number of each hidden state. Every tensor-parallel rank has all of it; a
    critic begins by saying 0."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden, dtype=dtype, device=device))

    def forward(self, states: Tensor) -> Tensor:
        """[n, hidden] -> [n] float32."""
        return states.float() @ self.weight.float()


class CriticModel(PolicyModel):
    """Part of a critic that this rank has. It loads a policy's weights, but for the output
    layer."""

    def __init__(
        self, hf_config: dict[str, Any], model: ModelConfig, *settings: Any, **named: Any
    ) -> None:
        """Arguments as of `PolicyModel`. Its experts are its own, and take no routes of the
        policy's."""
        super().__init__(
            hf_config, dataclasses.replace(model, routing_replay="off"), *settings, **named
        )

    def _build(self, first: bool, last: bool) -> Any:
        # The embedding has no output layer to share with.
        module = dataclasses.replace(self.spec, tied=False).build(
            self.config, str(self.device), first, last, self.kernels
        )
        if last:
            module.output_layer = ValueHead(self.spec.hidden, self.dtype, self.device)
        return module

    def _mapped(self, entries: list[FusedParameter]) -> list[FusedParameter]:
        return [entry for entry in entries if not entry.name.startswith("output_layer.")]

    def token_values(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Values before each token of `batch.scored`, by the last stage's hidden states: [b, s]
        float32, 0 elsewhere; differentiable."""
        from megatron.core.tensor_parallel import mappings

        if self.config.sequence_parallel:
            # Each rank makes all of the values, and so all of their gradient: its own share goes
            # back, and no sum.
            hidden = mappings.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._tensor_group
            )
        values = self.module.output_layer(hidden.flatten(0, 1).index_select(0, batch.scored.states))
        return self._whole(batch.scored.scatter(values, batch.mask.shape))

    def forward_values(self, micro_batches: Sequence[Batch]) -> list[np.ndarray] | None:
        """Values before each row's scored tokens, in order, [its length] float32, on the replica's
        leader; None on other ranks. Collective as `forward_logprobs`."""
        return self.rows_of(micro_batches, self.batch_scores(micro_batches, self.token_values))


class CriticTrainer(Trainer):
    """Trains a `CriticModel` by the value loss of an algorithm that has one."""

    model: CriticModel

    def __init__(
        self, model: CriticModel, algorithm: Algorithm, *settings: Any, **named: Any
    ) -> None:
        """Arguments as of `Trainer`. Whatever the policy's loss is a mean over, the value loss is
        one over tokens."""
        super().__init__(
            model, dataclasses.replace(algorithm, reduction="token_mean"), *settings, **named
        )

    def tails(self, tokens: float) -> dict[str, float]:
        """Empty: values have no ratios."""
        return {}

    def loss_of(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Trainer`; rows have `values` and `returns`."""
        return self.algorithm.value_loss(
            self.model.token_values(hidden, batch), batch.fields, batch.mask
        )
