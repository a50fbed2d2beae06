"""Tasks, one file each: a data source, an episode, a reward.

`data: {task: ...}` names one of `TASKS`, or `package.module:Class` of a user's own. Empty is `Task` itself: prompts of
files that the configuration names, one turn, and one of the rewards that are built in. Nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_hpc.errors import ConfigError
from relax_hpc.named import named
from relax_hpc.rewards import REWARDS
from relax_hpc.tasks.base import Ask, Task
from relax_hpc.tasks.sort_digits import SortDigits

if TYPE_CHECKING:
    from relax_hpc.config.schema import Config

TASKS: dict[str, type[Task]] = {"sort_digits": SortDigits}
__all__ = ["TASKS", "Ask", "Task", "eval_reward", "get_task", "train_reward"]


def get_task(name: str) -> Task:
    """The task called ``name``: built in, or imported from `package.module:Class`. ConfigError if there is none."""
    if not name:
        return Task()
    found = named("task", name, TASKS)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task: {name!r}: found no class derived from relax_hpc.tasks.Task")
    return found()


def train_reward(config: Config) -> str:
    """Name of the reward that is learned from, see `relax_hpc.rewards.get_reward`."""
    return config.rollout.reward or _own_reward(config.data.task)


def eval_reward(config: Config) -> str:
    """Name of the reward of evaluations."""
    return config.eval.reward or train_reward(config)


def _own_reward(task: str) -> str:
    """Of a task's own reward the name by which any process finds it."""
    reward = get_task(task).reward
    return next((name for name, known in REWARDS.items() if known is reward), f"{task}.reward")
