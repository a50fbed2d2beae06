"""Checks of the environment that episodes are played against, a line for each mistake."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Config, EnvironmentConfig
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.environments import tried
from relax_hpc.ops.checks.agents import check_agents
from relax_hpc.tasks import environment_of, get_task


def check_environment(config: Config) -> Iterator[str]:
    """Check `environment`, and the one that the task names where there is no other."""
    try:
        task = get_task(config.data.task)
    except ConfigError:
        # Said of the task.
        return
    yield from check_agents(config)
    if not (kind := environment_of(config)):
        if config.environment != EnvironmentConfig():
            yield (
                "environment: found settings, but no environment.kind, and none of the task; "
                "name one, or remove them"
            )
        return
    try:
        # Made, and not looked up alone: it knows its options best.
        if kind != AGENT:
            tried(kind, config.environment.options)
    except ConfigError as error:
        yield from error.mistakes
    if task.makes("episode"):
        yield (
            f"environment.kind: found {kind!r} beside task {config.data.task!r}, which plays its "
            "episodes itself; leave out one of both"
        )
    most = config.rollout.max_new_tokens
    if (found := config.environment.turn_tokens) > most:
        yield (
            f"environment.turn_tokens: found {found}, allowed: at most rollout.max_new_tokens, "
            f"{most}, which bounds all that a row has behind its prompt"
        )
