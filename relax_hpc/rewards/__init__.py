"""Rewards: functions of one response, found by name, and a guard that turns their failures into named reasons.

Several threads may call a function at once. One that takes longer than `rollout.reward_timeout_s` for a request's
responses goes on in its thread, with nobody waiting for it.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.named import named
from relax_hpc.rewards.answers import answer_exact, answer_partial

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward sees of a sample."""

    prompt: str
    answer: str
    response_text: str
    """The response without special tokens."""
    finish_reason: str
    """stop | length | abort"""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The other fields of the prompt's line."""


@dataclass(frozen=True, slots=True)
class RewardError:
    """A reward that could not be had; `reason` names a drop counter, `detail` is for the log."""

    reason: str
    """reward_exception | reward_not_a_number | reward_not_finite"""
    detail: str


Reward = Callable[[RewardInput], float]

REWARDS: dict[str, Reward] = {"answer_partial": answer_partial, "answer_exact": answer_exact}


def get_reward(name: str) -> Reward:
    """The reward called `name`: built in, or imported from `package.module:function`. ConfigError if there is none."""
    return named("reward", name, REWARDS)


def safe_reward(function: Reward, sample: RewardInput) -> float | RewardError:
    """The reward as a float that fits float32, or why there is none; never raises an Exception, nor SystemExit."""
    try:
        value = function(sample)
        # What numpy, torch and their like give for one number: an array without dimensions.
        if getattr(value, "shape", None) == () and not isinstance(value, numbers.Real):
            value = value.item()
    except (Exception, SystemExit) as error:  # a user's function may raise anything, and end itself
        return RewardError("reward_exception", f"{type(error).__name__}: {error}")
    if not isinstance(value, numbers.Real):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        return RewardError("reward_not_a_number", f"returned {type(value).__name__}{shape}, expected one number")
    if not abs(value) <= FLOAT32_MAX:
        return RewardError("reward_not_finite", f"returned {value}")
    return float(value)
