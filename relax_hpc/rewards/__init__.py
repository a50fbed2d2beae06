"""Rewards: functions of a prompt group, or of one response, found by name.

A function whose parameter is called `samples` gets all samples of a prompt and returns a list. Any
other function gets one sample and returns one value. Each value is a number, or a mapping of
component names to numbers that includes `total`. A function may be `def` or `async def`.
`relax_hpc.rewards.scoring` calls the functions; `relax_hpc.rewards.placement` chooses the process.
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
    """A sample, the input of a reward."""

    prompt: str
    answer: str
    response_text: str
    """Response as text, without special tokens."""
    finish_reason: str
    """End of the response, or of the last of several: stop, length or abort."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """All other fields of the prompt's line."""
    rows: list[list[str]] = field(default_factory=list)
    """[prompt, response] of each row, without special tokens, if the episode has several rows. The
    last response is `response_text`. Empty: the episode has one row."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Turns of an episode with an environment, row by row: {"by": policy or environment, "row",
    "text"}. The last response of the policy is `response_text`. Empty: no environment."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Results of the environment: `info`; `reward` (None: it gave none); `ended`, the reason why
    the episode ended. Empty: no environment."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a sample."""

    total: float
    """Reward that is learned from; fits float32."""
    components: dict[str, float] = field(default_factory=dict)
    """Components of the reward, for metrics and for readers of samples."""


@dataclass(frozen=True, slots=True)
class RewardError:
    """A failed reward; `reason` names a drop counter, `detail` is for the log."""

    reason: str
    """reward_exception | reward_not_a_number | reward_not_finite | reward_wrong_count |
    reward_timeout | reward_died | reward_away."""
    detail: str
    origin: ErrorOrigin = field(default=NO_ORIGIN, compare=False)
    """Line in the reward's code that raised an exception, or that ran when the time was over."""


Scores = list[Score] | RewardError
"""Scores of a prompt group, or the error of its reward."""
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
"""Built-in rewards by name. For a class, an instance made with the settings is the reward. Rewards
that are given as an import path run in reward workers, because they may take long, or must run in
the main thread."""
COMPOSED: dict[str, Reward | str] = {
    "weighted": "relax_hpc.rewards.composed:Weighted",
    "by_row": "relax_hpc.rewards.composed:ByRow",
}
"""Rewards that are composed of other rewards, see `relax_hpc.rewards.placement`. They are not
functions of samples."""


def get_reward(name: str, settings: RewardSettings | None = None) -> Reward:
    """The reward called `name`: built in, or imported from `package.module:function`.

    `package.module:Class` means an instance of the class, `package.module:Class.method` the method
    of an instance. ConfigError: the reward does not exist, or cannot be made.
    """
    definition, method = find_reward(name)
    if name in COMPOSED:
        raise ConfigError(
            f"reward: {name!r}: is composed of others, by relax_hpc.rewards.placement.make_rewards"
        )
    arguments = () if ":" in name else (settings or RewardSettings(),)
    try:
        instance = definition(*arguments) if isinstance(definition, type) else definition
    except RelaxError:
        raise
    except Exception as error:  # a user's class may raise anything
        text = f"reward: {name!r}: cannot be made: {describe_with_location(error)}"
        raise ConfigError(text) from error
    reward = getattr(instance, method) if method else instance
    if not callable(reward):
        raise ConfigError(
            f"reward: {name!r}: found {type(reward).__name__}, allowed: a function, or an object "
            "that can be called"
        )
    return reward


def find_reward(name: str) -> tuple[Reward, str]:
    """The function or class that ``name`` refers to, and the name of a method, or empty.
    ConfigError: it does not exist."""
    # The name of the module may have dots, too.
    module, colon, attribute = name.partition(":")
    attribute, _, method = attribute.partition(".")
    whole = f"{module}{colon}{attribute}"
    definition = load_plugin("reward", whole, REWARDS | COMPOSED)
    if method and not hasattr(definition, method):
        raise ConfigError(f"reward: {name!r}: {whole!r} has no method {method!r}; define it there")
    return definition, method
