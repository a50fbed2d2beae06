"""Tasks: a data source, an episode, a reward.

`data: {task: ...}` names a class as `package.module:Class`. An empty name stands for `Task` itself:
prompts of files that the configuration names, one turn, and a built-in reward. Nothing here imports
torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relax_hpc.base.error_origin import describe_with_location
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.plugins import load_plugin
from relax_hpc.base.signatures import describe_mismatch
from relax_hpc.environments import tried
from relax_hpc.rewards import REWARDS
from relax_hpc.rewards.signature import function_misfits
from relax_hpc.tasks.base import Ask, Task

if TYPE_CHECKING:
    from relax_hpc.config.schema import Config

_CALLED_WITH = {
    "rows": ("split", "data"),
    "demonstrations": ("data", "tokenizer", "noise", "seed"),
    "episode": ("request", "ask"),
}
"""Methods of a task -> the arguments that they get."""
_NEAR = 0.85
"""Similarity of two names of which one is probably the other, misspelled: `rewards`, but not
`reward_of`."""
__all__ = [
    "Ask",
    "Task",
    "environment_of",
    "eval_reward",
    "get_task",
    "misfits",
    "tools_of",
    "train_reward",
]


def get_task(name: str) -> Task:
    """The task that is imported from ``name``, `package.module:Class`. ConfigError: there is
    none."""
    if not name:
        return Task()
    found = load_plugin("task", name, {})
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task: {name!r}: found no class derived from relax_hpc.tasks.Task")
    try:
        return found()
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"task: {name!r}: cannot be made: {describe_with_location(error)}; it gets no arguments"
        ) from error


def misfits(task: Task) -> Iterator[str]:
    """Mistakes in a class of one's own, one line each, which begins with what it is of."""
    if not callable(task.reward):
        yield f"reward: found {task.reward!r}, allowed: a method"
    elif task.makes("reward"):
        yield from function_misfits(task.reward, "reward", "reward")
    for method, names in _CALLED_WITH.items():
        text = task.makes(method) and describe_mismatch(getattr(task, method), *names)
        if text:
            yield f"{method} {text}"
    if not (
        isinstance(task.evaluations, tuple | list) and all(map(_names_a_set, task.evaluations))
    ):
        yield (
            f"evaluations: found {task.evaluations!r}, allowed: a tuple of names, of letters, "
            "digits, _ and -, not train; of one name (name,)"
        )
    own = [name for name in sorted({*dir(task)}.difference(dir(Task))) if not name.startswith("_")]
    for part in ("rows", "evaluations", "demonstrations", "episode", "reward"):
        if not task.makes(part) and (
            near := difflib.get_close_matches(part, own, n=1, cutoff=_NEAR)
        ):
            yield (
                f"{near[0]}: found it, and no {part!r}, which it is spelled nearly like; rename "
                "it to that, or away"
            )


def _names_a_set(name: object) -> bool:
    return (
        isinstance(name, str)
        and name != "train"
        and bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name))
    )


def train_reward(config: Config) -> str:
    """Name of the reward that is learned from, see `relax_hpc.rewards.get_reward`."""
    return config.rollout.reward or _own_reward(config.data.task)


def eval_reward(config: Config) -> str:
    """Name of the reward of evaluations."""
    return config.eval.reward or train_reward(config)


def tools_of(config: Config) -> Sequence[Mapping[str, Any]]:
    """Signatures of the tools that a chat template shows. ConfigError: the environment that has
    them cannot be had."""
    kind = environment_of(config)
    return (
        tried(kind, config.environment.options).signatures
        if kind and config.data.chat_template
        else ()
    )


def environment_of(config: Config) -> str:
    """Name of the environment that episodes are played against, see `relax_hpc.environments`;
    empty: there is none."""
    return config.environment.kind or get_task(config.data.task).environment


def _own_reward(task: str) -> str:
    """Name by which any process finds a task's own reward."""
    reward = get_task(task).reward
    return next((name for name, known in REWARDS.items() if known is reward), f"{task}.reward")
