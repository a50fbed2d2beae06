"""Checks of the rewards that a configuration names."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.reward_settings import MATH_GROUP_LIMIT_S, MATH_LIMIT_S
from relax_hpc.base.signatures import describe_mismatch
from relax_hpc.config.groups import group_with_role
from relax_hpc.config.schema import Config
from relax_hpc.rewards import find_reward, get_reward
from relax_hpc.rewards.composed import parts_of
from relax_hpc.rewards.run_settings import reward_settings
from relax_hpc.rewards.signature import reward_misfits
from relax_hpc.rollout.engines.sglang.flags import check_flags
from relax_hpc.rollout.filters import get_filter
from relax_hpc.tasks import get_task

CONFIGURED_REWARDS = ("format", "remote", "judge")
"""Rewards that check their settings when they are created."""


def check_rewards(config: Config) -> Iterator[str]:
    """Check rollout.reward, eval.reward, the rewards that they combine, and rollout.filter."""
    yield from _default_reward(config)
    leaves = set[str]()
    # Without a name the reward is that of the task, which `_data` checks.
    names = {"rollout.reward": config.rollout.reward, "eval.reward": config.eval.reward}
    for key, name in names.items():
        for inner, leaf in parts_of(name, config.reward) if name else ():
            if not leaf:
                yield f"{inner}: found nothing, or the reward itself, allowed: other rewards"
            elif leaf not in leaves:
                leaves.add(leaf)
                yield from _check_reward(inner or key, leaf, config)
    yield from _check_judge(config, "judge" in leaves)
    if config.rollout.filter:
        try:
            text = describe_mismatch(get_filter(config.rollout.filter), "rewards")
            if text:
                yield f"rollout.filter: {config.rollout.filter!r} {text}, a list of numbers"
        except ConfigError as error:
            yield f"rollout.filter: {str(error).partition(': ')[2]}"


def _default_reward(config: Config) -> Iterator[str]:
    """Check that the run or its task names a reward: the default is only for the demo."""
    if config.rollout.reward or config.algorithm.from_file:
        return
    try:
        task = get_task(config.data.task)
    except ConfigError:
        return  # Another check names the mistake in the task.
    if task.makes("reward"):
        return
    source = "prompts from files"
    if config.data.task:
        source = f"data.task {config.data.task!r}, which has no reward"
    yield (
        f"rollout.reward: found nothing with {source}, allowed: the reward to learn from, such as "
        "math, math_answer, exact, f1, multiple_choice, environment, or a function of yours as "
        "my_package.rewards:score"
    )


def _check_judge(config: Config, is_named: bool) -> Iterator[str]:
    """Check the role genrm; ``is_named``: a reward of the run is `judge`."""
    group = group_with_role(config, "genrm")
    if not group:
        return
    yield from check_flags(config, "genrm.flags", config.genrm.flags)
    if not is_named:
        yield (
            f"groups.{group}.roles: found genrm, but judge is neither in rollout.reward nor in "
            "eval.reward; name it there, or remove the role"
        )
    for key in ("url", "endpoints"):
        value = getattr(config.reward.judge, key)
        if value:
            yield (
                f"reward.judge.{key}: found {value!r} and role genrm in group {group}, "
                "allowed: only one of them"
            )


def _check_reward(key: str, name: str, config: Config) -> Iterator[str]:
    """Check that the reward ``name`` exists and accepts the settings of the run."""
    try:
        find_reward(name)
        if ":" in name:
            yield from (f"{key}: {text}" for text in reward_misfits(name))
    except ConfigError as error:
        yield f"{key}: {str(error).partition(': ')[2]}"
        return
    if name == "code":
        yield from _code_time(config)
    if name in ("math", "math_boxed"):
        yield from _math_time(config)
    if name in CONFIGURED_REWARDS:
        try:
            get_reward(name, reward_settings(config))
        except ConfigError as error:
            yield str(error)


def _code_time(config: Config) -> Iterator[str]:
    limit_s, count = config.rollout.reward_timeout_s, config.samples_per_prompt
    timeout_s = config.reward.code.timeout_s
    if timeout_s * count > limit_s:
        yield (
            f"reward.code.timeout_s: found {timeout_s:g}, allowed: at most {limit_s / count:.3g} "
            f"(rollout.reward_timeout_s {limit_s:g} / samples_per_prompt {count}); else programs "
            "that never end would make their prompt group fail"
        )


def _math_time(config: Config) -> Iterator[str]:
    limit_s, needed_s = config.rollout.reward_timeout_s, MATH_GROUP_LIMIT_S + 2 * MATH_LIMIT_S
    if limit_s < needed_s:
        yield (
            f"rollout.reward_timeout_s: found {limit_s:g}, allowed with reward math: at least "
            f"{needed_s:g}; else expressions that take too long would make their prompt group fail"
        )
