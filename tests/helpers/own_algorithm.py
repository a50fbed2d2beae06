"""An algorithm as a user writes one: `algorithm: {name: "tests.helpers.own_algorithm:Opo", scale: 2.0}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from relax_hpc.algorithms import Algorithm
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses


@dataclass(kw_only=True)
class Opo(Algorithm):
    """Rewards against the mean of their prompt's tokens, in REINFORCE: OPO, arXiv 2505.23585,
    section 3."""

    uses_old: ClassVar[bool] = False

    scale: float = bounded(1.0, 0.0)
    """Factor of the advantages."""

    def advantages(self, rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        baseline = (tokens * rewards).sum(axis=1, keepdims=True) / tokens.sum(axis=1, keepdims=True)
        return self.scale * (rewards - baseline)

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        from relax_hpc.algorithms.losses import TokenLosses, ratio_to_old

        ratio = ratio_to_old(batch)
        pushed = batch.advantages < 0
        # A metric that only some micro-batches have is written all the same.
        metrics = {"pushed_away": pushed} if pushed.any() else {}
        return TokenLosses(-batch.advantages * batch.logprobs, ratio, ratio.isnan(), metrics)
