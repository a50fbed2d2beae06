"""Dr. GRPO: GRPO without the division by the standard deviation of the group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relax_hpc.algorithms.base import centred
from relax_hpc.algorithms.grpo import Grpo


@dataclass(kw_only=True)
class DrGrpo(Grpo):
    """A = R - mean. GRPO's division by the standard deviation, which gives too easy and too hard
    prompts more weight, is left out. arXiv 2503.20783, section 3."""

    name: str = "dr_grpo"

    def advantages(self, rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return centred(rewards)
