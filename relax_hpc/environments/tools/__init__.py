"""Tools that the policy may call, one file each, found by name: one of `TOOLS`, or
`package.module:Class`, or a function there that gives a list of them."""

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
"""Tools that are built in, by name: where each lies."""


def tools_of(wanted: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Tool]:
    """Tools by the names under which they are called. ``wanted``: name of a tool -> its options.

    ConfigError: there is no such tool, it cannot be made, or two are called alike.
    """
    if not isinstance(wanted, Mapping):
        raise ConfigError(
            f"environment.options.tools: found {wanted!r}, allowed: tools by name, with their "
            "options"
        )
    found: dict[str, Tool] = {}
    for name, options in wanted.items():
        for tool in _made(name, json.dumps(options or {}, sort_keys=True)):
            if tool.name in found:
                raise ConfigError(
                    f"environment.options.tools: two are called {tool.name!r}, allowed: one"
                )
            found[tool.name] = tool
    return found


def options_of(tool: str, environment: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Options of a tool, among those of an ``environment``; None: it has no such tool.

    >>> options_of("python", {"tools": {"python": None}}), options_of("search", {})
    ({}, None)
    """
    tools = environment.get("tools")
    return (tools[tool] or {}) if isinstance(tools, Mapping) and tool in tools else None


@functools.cache
def _made(name: str, options: str) -> tuple[Tool, ...]:
    """The tools of one name and these options, for the whole process: some take long to make."""
    try:
        made = load_plugin("environment.options.tools", name, TOOLS)(**json.loads(options))
    except TypeError as error:
        raise ConfigError(
            f"environment.options.tools: {name!r} cannot be made with {options}: {error}"
        ) from error
    tools = tuple(made) if isinstance(made, list) else (made,)
    if not all(isinstance(tool, Tool) for tool in tools):
        raise ConfigError(
            f"environment.options.tools: {name!r}: found no class derived from Tool, and no list "
            "of them"
        )
    return tools
