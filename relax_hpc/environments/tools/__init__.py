"""Tools that the policy may call, one file each, found by name: one of `TOOLS`, or a user's class
as `package.module:Class`, or a user's function that returns a list of tools."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.plugins import load_plugin
from relax_hpc.environments.tools.base import Tool

TOOLS: dict[str, str] = {
    "calculator": "relax_hpc.environments.tools.calculator:Calculator",
    "python": "relax_hpc.environments.tools.python:Python",
    "search": "relax_hpc.environments.tools.search:Search",
    "mcp": "relax_hpc.environments.tools.mcp:mcp_tools",
}
"""Name of a built-in tool -> its import path."""


def tools_of(wanted: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Tool]:
    """Tools by the names under which the policy calls them. ``wanted``: name of a tool -> its
    options.

    ConfigError: a tool does not exist or cannot be made, or two tools have the same name.
    """
    if not isinstance(wanted, Mapping):
        raise ConfigError(
            f"environment.options.tools: found {wanted!r}, allowed: tools by name, with their "
            "options"
        )
    tools: dict[str, Tool] = {}
    for name, options in wanted.items():
        for tool in _make_tools(name, json.dumps(options or {}, sort_keys=True)):
            if tool.name in tools:
                raise ConfigError(
                    f"environment.options.tools: two are called {tool.name!r}, allowed: one"
                )
            tools[tool.name] = tool
    return tools


def options_of(tool: str, environment: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Options of a tool in the options of an ``environment``; None: it does not have the tool.

    >>> options_of("python", {"tools": {"python": None}}), options_of("search", {})
    ({}, None)
    """
    tools = environment.get("tools")
    return (tools[tool] or {}) if isinstance(tools, Mapping) and tool in tools else None


@functools.cache
def _make_tools(name: str, options: str) -> tuple[Tool, ...]:
    """The tools of one name with these options. They are cached for the whole process, because some
    take long to make."""
    try:
        plugin: Any = load_plugin("environment.options.tools", name, TOOLS)
        instance = plugin(**json.loads(options))
    except TypeError as error:
        raise ConfigError(
            f"environment.options.tools: {name!r} cannot be made with {options}: {error}"
        ) from error
    tools = tuple(instance) if isinstance(instance, list) else (instance,)
    if not all(isinstance(tool, Tool) for tool in tools):
        raise ConfigError(
            f"environment.options.tools: {name!r}: found no class derived from Tool, and no list "
            "of them"
        )
    return tools
