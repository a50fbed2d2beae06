"""Supervised fine-tuning: the policy learns to reproduce demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from relax_hpc.algorithms.base import Row
from relax_hpc.algorithms.from_file import FromFile

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.batch import TokenBatch


@dataclass(kw_only=True)
class Sft(FromFile):
    """Cross entropy of the assistant's tokens: the first step of InstructGPT, arXiv 2203.02155,
    section 3.5."""

    sequences: ClassVar[int] = 1

    name: str = "sft"

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        from relax_hpc.algorithms.losses import token_shares

        share, counts = token_shares(batch, self)
        loss = -(share * batch.clean().logprobs).sum()
        return loss, {**counts, "loss/policy": loss.detach()}

    def held_out(self, rows: Sequence[Row], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
        """Return the cross entropy `loss`, the mean over all trained tokens, in nats."""
        trained = np.concatenate(
            [values[row["loss_mask"] > 0] for row, values in zip(rows, logprobs, strict=True)]
        )
        return {"loss": -float(trained.mean(dtype=np.float64))}
