"""Direct preference optimization: the preferred one of two responses becomes more likely."""

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
    """DPO, arXiv 2305.18290, equation 7: -log sigmoid(h). h is the implicit reward of the chosen
    response, beta log policy/reference, minus the implicit reward of the rejected response. The
    mean is over pairs.

    With `label_smoothing` e the loss is -(1 - e) log sigmoid(h) - e log sigmoid(-h), for labels
    that are wrong with probability e (E. Mitchell, "A note on DPO with noisy preferences &
    relationship to IPO", 2023). `ipo`: (h / beta - 1 / (2 beta))^2, arXiv 2310.12036, equation 17.
    Its rewards are means over a response's tokens, as in TRL. With sums, a long response would have
    to stay as near to the reference as a short one.
    """

    sequences: ClassVar[int] = 2
    leaves_out: ClassVar[tuple[str, ...]] = (
        *FromFile.leaves_out,
        "reduction",
        "balance_coefficient",
    )

    name: str = "dpo"
    beta: float = bounded(0.1, 1e-6)
    """Factor of the implicit reward beta log policy/reference. The larger it is, the nearer the
    policy stays to the reference."""
    preference: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair: `sigmoid` (DPO) or `ipo`."""
    label_smoothing: float = bounded(0.0, 0.0, 0.5)
    """Probability that a label is wrong. It applies to `sigmoid`."""

    def loss_needs(self, stale: bool = False) -> tuple[str, ...]:
        return ("ref_logprobs",)

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss summed over the pairs of ``batch``. Rows are chosen, rejected, chosen,
        ...

        A rank may have a micro-batch without a pair: a single row without trained tokens. It adds
        0.
        """
        x = batch.clean()
        if x.ref_logprobs is None:
            raise ValueError("dpo: the batch has no ref_logprobs")
        rewards = self.beta * (x.logprobs - x.ref_logprobs).sum(1)
        if self.preference == "ipo":
            rewards = rewards / x.row_tokens()[:, 0].clamp(min=1.0)
        chosen, rejected = rewards[: len(rewards) // 2 * 2].view(-1, 2).unbind(1)
        margin = chosen - rejected
        loss = self._pair_losses(margin).sum()
        sums = {
            "loss/policy": loss,
            "preference/accuracy": (margin > 0).sum(),
            "preference/margin": margin.sum(),
            "preference/chosen": chosen.sum(),
            "preference/rejected": rejected.sum(),
        }
        counts = {"weight": loss.new_tensor(len(margin)), "tokens": (batch.mask > 0).sum()}
        metrics = {**counts, **sums}
        return loss, {name: value.detach().to(loss.dtype) for name, value in metrics.items()}

    def held_out(self, rows: Sequence[Row], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
        """Return the mean `loss` and `margin` of pairs, and `accuracy`, the share of pairs whose
        margin is above 0."""
        import torch

        log_ratios = [
            (policy - row["ref_logprobs"])[row["loss_mask"] > 0]
            for row, policy in zip(rows, logprobs, strict=True)
        ]
        reduce = np.mean if self.preference == "ipo" else np.sum
        rewards = [self.beta * reduce(log_ratio, dtype=np.float64) for log_ratio in log_ratios]
        margin = torch.tensor(rewards[::2]) - torch.tensor(rewards[1::2])
        values = {
            "loss": self._pair_losses(margin),
            "accuracy": (margin > 0).double(),
            "margin": margin,
        }
        return {name: float(value.mean()) for name, value in values.items()}

    def _pair_losses(self, margin: Tensor) -> Tensor:
        """Return the loss of each pair [n] from the difference of its implicit rewards."""
        from torch.nn.functional import logsigmoid

        if self.preference == "ipo":
            return (margin - 0.5).square() / self.beta**2
        smooth = self.label_smoothing
        return -(1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)
