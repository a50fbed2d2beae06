"""Rewards of prompt groups to advantages, in numpy: the hub computes them and never loads torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from relax_hpc.errors import ConfigError


def grpo(centred: np.ndarray, eps: float) -> np.ndarray:
    """(R - mean) / (std + eps), the unbiased std of the group. arXiv 2402.03300, section 4.1.2."""
    return centred / (centred.std(axis=1, ddof=1, keepdims=True) + eps)


def dr_grpo(centred: np.ndarray, eps: float) -> np.ndarray:
    """R - mean: without the division that favours too easy and too hard prompts. arXiv 2503.20783, section 3."""
    return centred


def rloo(centred: np.ndarray, eps: float) -> np.ndarray:
    """R - mean of the *other* samples = n / (n - 1) * (R - mean). arXiv 2402.14740, section 3.3."""
    n = centred.shape[1]
    return centred * (n / (n - 1))


ADVANTAGES: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""Name in `AlgorithmConfig.advantage` -> function of (rewards minus their group's mean [groups, n], eps)."""


def group_advantages(rewards: np.ndarray, kind: str, eps: float = 1e-6) -> np.ndarray:
    """Advantages [groups, n], float64, of `rewards` [groups, n]; exactly 0 in a group whose rewards are all equal.

    ConfigError: unknown `kind`. ValueError: not two-dimensional, fewer than two samples, or rewards not finite.
    """
    if kind not in ADVANTAGES:
        raise ConfigError(f"algorithm.advantage: found {kind!r}, allowed {', '.join(ADVANTAGES)}")
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards have shape {rewards.shape}, expected [groups, n >= 2]")
    if not np.isfinite(rewards).all():
        raise ValueError("rewards are not finite")
    # Without the test, rounding of the mean would leave noise that the division by a tiny std blows up.
    equal = (rewards == rewards[:, :1]).all(axis=1, keepdims=True)
    centred = np.where(equal, 0.0, rewards - rewards.mean(axis=1, keepdims=True))
    return ADVANTAGES[kind](centred, eps)


def token_advantages(advantage: float, loss_mask: np.ndarray) -> np.ndarray:
    """`advantage` on every token with mask 1, else 0: float32, of the shape of `loss_mask`."""
    return np.where(np.asarray(loss_mask) > 0, np.float32(advantage), np.float32(0.0))
