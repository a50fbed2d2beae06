"""RLOO: REINFORCE with the mean reward of the prompt's other responses as the baseline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relax_hpc.algorithms.base import centred
from relax_hpc.algorithms.grpo import Grpo


@dataclass(kw_only=True)
class Rloo(Grpo):
    """A = R - mean of the *other* episodes = n / (n - 1) * (R - mean). arXiv 2402.14740, section
    3.3."""

    name: str = "rloo"

    def advantages(self, rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        n = rewards.shape[1]
        return centred(rewards) * (n / (n - 1))
