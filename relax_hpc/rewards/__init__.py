"""Rewards: functions of a prompt group, or of one response, found by name.

A function whose parameter is called `samples` gets all samples of a prompt and gives a list; any
other gets one and gives one. Each value is a number, or a mapping of components, by name, with the
`total` among them. `async def` is as good as `def`. `relax_hpc.rewards.scoring` calls them,
`relax_hpc.rewards.placement` says in which process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.base.error_origin import NO_ORIGIN, ErrorOrigin, describe_with_location
from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.plugins import load_plugin
from relax_hpc.base.reward_settings import RewardSettings
from relax_hpc.rewards.answers import answer_exact, answer_partial
from relax_hpc.rewards.choice import multiple_choice
from relax_hpc.rewards.dapo import dapo
from relax_hpc.rewards.environment_reward import environment
from relax_hpc.rewards.maths import math_answer, math_answer_strict
from relax_hpc.rewards.words import exact, f1


@dataclass(frozen=True, slots=True)
class RewardInput:
    """Sample as a reward sees it."""

    prompt: str
    answer: str
    response_text: str
    """Response as text, without special tokens."""
    finish_reason: str
    """End of the response, of several the last one: stop
     length
     abort."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Fields of the prompt's line besides these."""
    rows: list[list[str]] = field(default_factory=list)
    """Prompt and response of each row of an episode of several, without special tokens; the last
    response is `response_text`. Empty: there is one row."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Turns of an episode against an environment, row by row: {"by": policy or environment, "row",
    "text"}; the last response of the policy is `response_text`. Empty: it was played against
    none."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Words of its environment on such an episode: `info`, `reward` (None: it has none); and
    `ended`: why it did."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a sample."""

    total: float
    """Reward that is learned from; fits float32."""
    components: dict[str, float] = field(default_factory=dict)
    """Components of the reward on the sample: for metrics, and for who reads samples."""


@dataclass(frozen=True, slots=True)
class RewardError:
    """A reward that could not be had; `reason` names a drop counter, `detail` is for the log."""

    reason: str
    """Reason: reward_exception
     reward_not_a_number
     reward_not_finite
     reward_wrong_count
     reward_timeout
     reward_died
     reward_away."""
    detail: str
    origin: ErrorOrigin = field(default=NO_ORIGIN, compare=False)
    """Place in the reward's code, of an exception or of a call that took too long."""


Scores = list[Score] | RewardError
"""Scores of a prompt group, or why there are none."""
Reward = Callable[..., Any]

REWARDS: dict[str, Reward | str] = {
    "answer_partial": answer_partial,
    "answer_exact": answer_exact,
    "exact": exact,
    "f1": f1,
    "multiple_choice": multiple_choice,
    "math_answer": math_answer,
    "math_answer_strict": math_answer_strict,
    "dapo": dapo,
    "environment": environment,
    "math": "relax_hpc.rewards.symbolic:math_scores",
    "math_boxed": "relax_hpc.rewards.symbolic:math_boxed_scores",
    "format": "relax_hpc.rewards.format:Format",
    "code": "relax_hpc.rewards.code:Code",
    "remote": "relax_hpc.rewards.remote:Remote",
    "judge": "relax_hpc.rewards.judge:Judge",
}
"""Rewards that are built in, by name. Of a class an instance, made with the settings, is the
reward. Those that only say where they lie are computed in reward workers: they may take long, or
want what only the main thread has."""
COMPOSED: dict[str, Reward | str] = {
    "weighted": "relax_hpc.rewards.composed:Weighted",
    "by_row": "relax_hpc.rewards.composed:ByRow",
}
"""Rewards that are made of others, see `relax_hpc.rewards.placement`: no functions of samples."""


def get_reward(name: str, settings: RewardSettings | None = None) -> Reward:
    """The reward called `name`: built in, or imported from `package.module:function`.

    Of `package.module:Class` an instance is the reward, of `package.module:Class.method` that
    method of one. ConfigError: there is none.
    """
    found, method = find_reward(name)
    if name in COMPOSED:
        raise ConfigError(
            f"reward: {name!r}: is made of others, by relax_hpc.rewards.placement.make_rewards"
        )
    given = () if ":" in name else (settings or RewardSettings(),)
    try:
        made = found(*given) if isinstance(found, type) else found
    except RelaxError:
        raise
    except Exception as error:  # a user's class may raise anything
        text = f"reward: {name!r}: cannot be made: {describe_with_location(error)}"
        raise ConfigError(text) from error
    reward = getattr(made, method) if method else made
    if not callable(reward):
        raise ConfigError(
            f"reward: {name!r}: found {type(reward).__name__}, allowed: what can be called"
        )
    return reward


def find_reward(name: str) -> tuple[Reward, str]:
    """Reward that ``name`` names, not made yet, and the method of it that is meant. ConfigError:
    there is none."""
    # Module names have points too.
    module, colon, attribute = name.partition(":")
    attribute, _, method = attribute.partition(".")
    whole = f"{module}{colon}{attribute}"
    found = load_plugin("reward", whole, REWARDS | COMPOSED)
    if method and not hasattr(found, method):
        raise ConfigError(f"reward: {name!r}: {whole!r} has no method {method!r}; define it there")
    return found, method
