"""Direct preference optimization: of two responses to a prompt, the preferred one becomes the more
likely one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from relax_hpc.algorithms.base import Row
from relax_hpc.algorithms.from_file import FromFile
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.batch import TokenBatch


@dataclass(kw_only=True)
class Dpo(FromFile):
    """DPO, arXiv 2305.18290, equation 7: -log sigmoid(h), where h is the implicit reward of the
    chosen response, beta log policy/reference, less that of the rejected one. The mean is over
    pairs.

    With `label_smoothing` e the loss is -(1 - e) log sigmoid(h) - e log sigmoid(-h), for labels
    that are wrong with probability e (E. Mitchell, "A note on DPO with noisy preferences &
    relationship to IPO", 2023). `ipo`: (h / beta - 1 / (2 beta))^2, arXiv 2310.12036, equation 17,
    with rewards that are means over a response's tokens, as TRL has it: of sums a long response
    would have to be as near to the reference as a short one.
    """

    sequences: ClassVar[int] = 2
    leaves_out: ClassVar[tuple[str, ...]] = (
        *FromFile.leaves_out,
        "reduction",
        "balance_coefficient",
    )

    name: str = "dpo"
    beta: float = bounded(0.1, 1e-6)
    """Weight of staying near the reference: an implicit reward is beta log policy/reference."""
    preference: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair's margin."""
    label_smoothing: float = bounded(0.0, 0.0, 0.5)
    """Probability that a label is wrong, of `sigmoid`."""

    def loss_needs(self, stale: bool = False) -> tuple[str, ...]:
        return ("ref_logprobs",)

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over the pairs of ``batch``, whose rows are chosen, rejected, chosen, ...

        A micro-batch of a rank that has no pair, a single row without trained tokens, adds 0.
        """
        x = batch.clean()
        if x.ref_logprobs is None:
            raise ValueError("dpo: the batch has no ref_logprobs")
        rewards = self.beta * (x.logprobs - x.ref_logprobs).sum(1)
        if self.preference == "ipo":
            rewards = rewards / x.row_tokens()[:, 0].clamp(min=1.0)
        chosen, rejected = rewards[: len(rewards) // 2 * 2].view(-1, 2).unbind(1)
        margin = chosen - rejected
        loss = self._of_margin(margin).sum()
        sums = {
            "loss/policy": loss,
            "preference/accuracy": (margin > 0).sum(),
            "preference/margin": margin.sum(),
            "preference/chosen": chosen.sum(),
            "preference/rejected": rejected.sum(),
        }
        counts = {"weight": loss.new_tensor(len(margin)), "tokens": (batch.mask > 0).sum()}
        return loss, {
            name: value.detach().to(loss.dtype) for name, value in {**counts, **sums}.items()
        }

    def held_out(self, rows: Sequence[Row], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
        """Mean `loss` and `margin` of pairs, and the share of them whose margin is above 0,
        `accuracy`."""
        import torch

        gained = [
            (found - row["ref_logprobs"])[row["loss_mask"] > 0]
            for row, found in zip(rows, logprobs, strict=True)
        ]
        reduce = np.mean if self.preference == "ipo" else np.sum
        rewards = [self.beta * reduce(one, dtype=np.float64) for one in gained]
        margin = torch.tensor(rewards[::2]) - torch.tensor(rewards[1::2])
        values = {
            "loss": self._of_margin(margin),
            "accuracy": (margin > 0).double(),
            "margin": margin,
        }
        return {name: float(value.mean()) for name, value in values.items()}

    def _of_margin(self, margin: Tensor) -> Tensor:
        """Loss of each pair [n] by the difference of its implicit rewards."""
        from torch.nn.functional import logsigmoid

        if self.preference == "ipo":
            return (margin - 0.5).square() / self.beta**2
        smooth = self.label_smoothing
        return -(1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)
