"""Dr. GRPO: GRPO without the division by the group's spread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relax_hpc.algorithms.base import centred
from relax_hpc.algorithms.grpo import Grpo


@dataclass(kw_only=True)
class DrGrpo(Grpo):
    """A = R - mean, without the division that favours too easy and too hard prompts. arXiv
    2503.20783, section 3."""

    name: str = "dr_grpo"

    def advantages(self, rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return centred(rewards)
