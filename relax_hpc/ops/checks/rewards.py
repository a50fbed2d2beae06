"""Checks of the rewards that a configuration names, a line for each mistake."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.reward_settings import MATH_GROUP_LIMIT_S, MATH_LIMIT_S
from relax_hpc.base.signatures import describe_mismatch
from relax_hpc.config.groups import group_with
from relax_hpc.config.schema import Config
from relax_hpc.rewards import find_reward, get_reward
from relax_hpc.rewards.composed import parts_of
from relax_hpc.rewards.run_settings import reward_settings
from relax_hpc.rewards.signature import reward_misfits
from relax_hpc.rollout.engines.sglang.flags import check_flags
from relax_hpc.rollout.filters import get_filter
from relax_hpc.tasks import get_task

SETTLED_HERE = ("format", "remote", "judge")
"""Rewards whose settings are looked at by making one."""


def check_rewards(config: Config) -> Iterator[str]:
    """Check rollout.reward and eval.reward, the rewards that they are made of, and
    rollout.filter."""
    yield from _unnamed(config)
    leaves = set[str]()
    # A task's own is there with the task.
    for key, name in (
        ("rollout.reward", config.rollout.reward),
        ("eval.reward", config.eval.reward),
    ):
        for inner, leaf in parts_of(name, config.reward) if name else ():
            if not leaf:
                yield (
                    f"{inner}: found nothing, or itself within it, allowed: names of other rewards"
                )
            elif leaf not in leaves:
                leaves.add(leaf)
                yield from _of(inner or key, leaf, config)
    yield from _servers(config, "judge" in leaves)
    if config.rollout.filter:
        try:
            text = describe_mismatch(get_filter(config.rollout.filter), "rewards")
            if text:
                yield f"rollout.filter: {config.rollout.filter!r} {text}, a list of numbers"
        except ConfigError as error:
            yield f"rollout.filter: {str(error).partition(': ')[2]}"


def _unnamed(config: Config) -> Iterator[str]:
    """Whether a run would learn from the default reward of the demo, because neither it nor its
    task names one."""
    if config.rollout.reward or config.algorithm.from_file:
        return
    try:
        task = get_task(config.data.task)
    except ConfigError:
        return  # Another check names the mistake in the task.
    if task.makes("reward"):
        return
    source = (
        f"data.task {config.data.task!r}, which has no reward"
        if config.data.task
        else "prompts of files"
    )
    yield (
        f"rollout.reward: found nothing with {source}, allowed: the reward to learn from, such as "
        "math, math_answer, exact, f1, multiple_choice, environment, or a function of yours as "
        "my_package.rewards:score"
    )


def _servers(config: Config, asked: bool) -> Iterator[str]:
    """Whether a judge of the run's own is ``asked``, and may be started so."""
    if not (group := group_with(config, "genrm")):
        return
    yield from check_flags(config, "genrm.flags", config.genrm.flags)
    if not asked:
        yield (
            f"groups.{group}.roles: found genrm, and judge neither in rollout.reward nor in "
            "eval.reward; name it, or remove the role"
        )
    for key in ("url", "endpoints"):
        if found := getattr(config.reward.judge, key):
            yield (
                f"reward.judge.{key}: found {found!r} beside role genrm in group {group}, "
                "allowed: one of both"
            )


def _of(key: str, name: str, config: Config) -> Iterator[str]:
    try:
        find_reward(name)
        if ":" in name:
            yield from (f"{key}: {text}" for text in reward_misfits(name))
    except ConfigError as error:
        yield f"{key}: {str(error).partition(': ')[2]}"
        return
    if name == "code":
        yield from _time(config)
    if name in ("math", "math_boxed"):
        yield from _math_time(config)
    if name in SETTLED_HERE:
        try:
            get_reward(name, reward_settings(config))
        except ConfigError as error:
            yield str(error)


def _time(config: Config) -> Iterator[str]:
    limit, count = config.rollout.reward_timeout_s, config.samples_per_prompt
    if (found := config.reward.code.timeout_s) * count > limit:
        yield (
            f"reward.code.timeout_s: found {found:g}, allowed: at most {limit / count:.3g}, "
            "rollout.reward_timeout_s, "
            f"{limit:g}, divided by samples_per_prompt, {count}; else programs that never end "
            "would fail their group"
        )


def _math_time(config: Config) -> Iterator[str]:
    limit_s, needed_s = config.rollout.reward_timeout_s, MATH_GROUP_LIMIT_S + 2 * MATH_LIMIT_S
    if limit_s < needed_s:
        yield (
            f"rollout.reward_timeout_s: found {limit_s:g}, allowed with reward math: at least "
            f"{needed_s:g}; else expressions that take too long would fail their prompt group"
        )
