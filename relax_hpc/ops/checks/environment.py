"""Checks of environments and agent programs that episodes use."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.groups import group_with_role
from relax_hpc.config.schema import Config, EnvironmentConfig
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.data.template_files import find_templates
from relax_hpc.environments import try_environment
from relax_hpc.rollout.agents.options import AgentOptions
from relax_hpc.tasks import environment_name, get_task


def check_environment(config: Config) -> Iterator[str]:
    """Check `environment`, or else the environment that the task names."""
    try:
        task = get_task(config.data.task)
    except ConfigError:
        return  # Another check names the mistake in the task.
    yield from _check_agents(config)
    kind = environment_name(config)
    if not kind:
        if config.environment != EnvironmentConfig():
            yield (
                "environment: found settings, but neither environment.kind nor an environment of "
                "the task; name one, or remove the settings"
            )
        return
    try:
        # Create it, because only the environment can check its options.
        if kind != AGENT:
            try_environment(kind, config.environment.options)
    except ConfigError as error:
        yield from error.mistakes
    if task.makes("episode"):
        yield (
            f"environment.kind: found {kind!r} with task {config.data.task!r}, which plays its "
            "episodes itself; remove one of them"
        )
    limit, turn_tokens = config.rollout.max_new_tokens, config.environment.turn_tokens
    if turn_tokens > limit:
        yield (
            f"environment.turn_tokens: found {turn_tokens}, allowed: at most "
            f"rollout.max_new_tokens, {limit}, which limits all tokens after the prompt in a row"
        )


def _check_agents(config: Config) -> Iterator[str]:
    """Check what agent programs need: role gateway, a chat template, and the program itself."""
    group, kind = group_with_role(config, "gateway"), config.environment.kind
    if kind != AGENT:
        if group:
            yield (
                f"groups.{group}.roles: found gateway with environment.kind {kind!r}, allowed: "
                f"environment.kind {AGENT}; set it, or remove the role"
            )
        return
    if group != "hub":
        yield (
            f"groups: found role gateway in {group or 'no group'}, allowed: hub, which "
            f"environment.kind {AGENT} needs"
        )
    if config.data.chat_template:
        yield (
            f"data.chat_template: found {config.data.chat_template!r} with environment.kind "
            f"{AGENT}, allowed: none; programs get prompts without a template, and "
            "environment.options.chat_template renders their chats"
        )
    try:
        options = AgentOptions.from_options(config.environment.options)
        if options.chat_template != "model" or config.model.path:
            find_templates(options.chat_template, Path(config.model.path))
    except ConfigError as error:
        yield str(error).replace("data.chat_template", "environment.options.chat_template")
        return
    if config.layout == "local" and not shutil.which(options.command[0]):
        yield (
            f"environment.options.command: found {options.command[0]!r}, which is not a program "
            "here; name its full path"
        )
