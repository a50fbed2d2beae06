"""Tasks: a data source, an episode, a reward.

`data: {task: ...}` names a class as `package.module:Class`. An empty name means `Task` itself:
prompts from the files of the configuration, one turn, and a built-in reward. This package does not
import torch.
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
from relax_hpc.environments import try_environment
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
"""Methods of a task, and their arguments."""
_SIMILAR = 0.85
"""Similarity of a name and its misspelling: it accepts `rewards` for `reward`, but not `reward_of`.
"""
__all__ = [
    "Ask",
    "Task",
    "environment_name",
    "eval_reward",
    "get_task",
    "misfits",
    "tool_signatures",
    "train_reward",
]


def get_task(name: str) -> Task:
    """Create the task that ``name`` imports, as `package.module:Class`; empty: the default task.

    ConfigError: there is no such class, or it cannot be created.
    """
    if not name:
        return Task()
    task_class: Any = load_plugin("task", name, {})
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        raise ConfigError(f"task: {name!r}: found no class derived from relax_hpc.tasks.Task")
    try:
        return task_class()
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"task: {name!r}: cannot be created: {describe_with_location(error)}; it gets no "
            "arguments"
        ) from error


def misfits(task: Task) -> Iterator[str]:
    """Mistakes in the class of a task, one line each, which begins with the name of a member."""
    if not callable(task.reward):
        yield f"reward: found {task.reward!r}, allowed: a method"
    elif task.makes("reward"):
        yield from function_misfits(task.reward, "reward", "reward")
    for method, parameters in _CALLED_WITH.items():
        if task.makes(method):
            mismatch = describe_mismatch(getattr(task, method), *parameters)
            if mismatch:
                yield f"{method} {mismatch}"
    evaluations = task.evaluations
    if not isinstance(evaluations, tuple | list) or not all(map(_is_set_name, evaluations)):
        yield (
            f"evaluations: found {evaluations!r}, allowed: a tuple of names, of letters, "
            "digits, _ and -, not train; of one name (name,)"
        )
    yield from _misspelled_members(task)


def _misspelled_members(task: Task) -> Iterator[str]:
    """A line for each member whose name is similar to one of `Task` that the class lacks."""
    added = sorted({*dir(task)}.difference(dir(Task)))
    public = [name for name in added if not name.startswith("_")]
    for member in ("rows", "evaluations", "demonstrations", "episode", "reward"):
        if not task.makes(member):
            for name in difflib.get_close_matches(member, public, n=1, cutoff=_SIMILAR):
                yield f"{name}: found it, and no {member!r}, which has a similar name; rename it"


def _is_set_name(name: object) -> bool:
    """Whether ``name`` is allowed for an evaluation set."""
    if not isinstance(name, str) or name == "train":
        return False
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name))


def train_reward(config: Config) -> str:
    """Name of the reward for training, see `relax_hpc.rewards.get_reward`."""
    return config.rollout.reward or _task_reward(config.data.task)


def eval_reward(config: Config) -> str:
    """Name of the reward of evaluations."""
    return config.eval.reward or train_reward(config)


def tool_signatures(config: Config) -> Sequence[Mapping[str, Any]]:
    """Signatures of the environment's tools, for a chat template; empty without one.

    ConfigError: the environment cannot be created.
    """
    kind = environment_name(config)
    if not kind or not config.data.chat_template:
        return ()
    return try_environment(kind, config.environment.options).signatures


def environment_name(config: Config) -> str:
    """Name of the environment of episodes, see `relax_hpc.environments`; empty without one."""
    return config.environment.kind or get_task(config.data.task).environment


def _task_reward(task: str) -> str:
    """Name under which any process finds the reward of a task."""
    reward = get_task(task).reward
    for name, built_in in REWARDS.items():
        if built_in is reward:
            return name
    return f"{task}.reward"


# Names in release 0.1.
environment_of = environment_name
tools_of = tool_signatures
