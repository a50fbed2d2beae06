"""Mistakes in runs whose episodes are played by agent programs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.groups import group_with
from relax_hpc.config.schema import Config
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.data.template_files import find_templates
from relax_hpc.rollout.agents.options import AgentOptions


def check_agents(config: Config) -> Iterator[str]:
    """Check what programs need to play, and that nobody else has their endpoint; a line for each
    mistake."""
    group, kind = group_with(config, "gateway"), config.environment.kind
    if kind != AGENT:
        if group:
            yield (
                f"groups.{group}.roles: found gateway, and environment.kind {kind!r}; set that to "
                f"{AGENT}, or remove it"
            )
        return
    if group != "hub":
        yield (
            f"groups: found role gateway in {group or 'no group'}, allowed: hub, which "
            f"environment.kind {AGENT} needs"
        )
    if config.data.chat_template:
        yield (
            f"data.chat_template: found {config.data.chat_template!r} beside environment.kind "
            f"{AGENT}, allowed: none; "
            "programs are given prompts as they stand, and environment.options.chat_template is "
            "that of their chats"
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
            f"environment.options: found no program {options.command[0]!r} in command; name one, "
            "by its whole path"
        )
