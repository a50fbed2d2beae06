"""Generalized advantage estimation."""

from __future__ import annotations

import numpy as np


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """Return the advantages [t, n] of n episodes, float64, from ``rewards`` after and ``values``
    before each of their t tokens.

    A_t = sum over l >= 0 of (gamma lambda)^l d_(t+l) with d_t = r_t + gamma V_(t+1) - V_t; arXiv
    1506.02438, equation 16. Shorter episodes are padded with zeros in both arrays: the value after
    the end of an episode is 0.

    >>> gae(np.array([[0.0], [1.0]]), np.array([[0.5], [0.25]]), gamma=1.0, gae_lambda=0.5).tolist()
    [[0.125], [0.75]]
    """
    advantages = rewards - values
    advantages[:-1] += gamma * values[1:]
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += gamma * gae_lambda * advantages[t + 1]
    return advantages
