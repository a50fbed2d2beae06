"""Tools that the policy may call, one file each, found by name: one of `TOOLS`, or `package.module:Class`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from relax_hpc.environments.tools.base import Tool
from relax_hpc.errors import ConfigError
from relax_hpc.named import named

TOOLS: dict[str, str] = {
    "calculator": "relax_hpc.environments.tools.calculator:Calculator",
    "python": "relax_hpc.environments.tools.python:Python",
    "search": "relax_hpc.environments.tools.search:Search",
}
"""Tools that are built in, by name: where each lies."""


def tools_of(wanted: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Tool]:
    """Tools by the names under which they are called. ``wanted``: name of a tool -> its options.

    ConfigError: there is no such tool, or it cannot be made.
    """
    if not isinstance(wanted, Mapping):
        raise ConfigError(f"environment.options.tools: found {wanted!r}, allowed: tools by name, with their options")
    made = [_made(name, json.dumps(options or {}, sort_keys=True)) for name, options in wanted.items()]
    return {tool.name: tool for tool in made}


@functools.cache
def _made(name: str, options: str) -> Tool:
    """One tool of these options for the whole process: some take long to make."""
    kind = named("environment.options.tools", name, TOOLS)
    if not (isinstance(kind, type) and issubclass(kind, Tool)):
        raise ConfigError(f"environment.options.tools: {name!r}: found no class derived from Tool")
    try:
        return kind(**json.loads(options))
    except TypeError as error:
        raise ConfigError(f"environment.options.tools: {name!r} cannot be made with {options}: {error}") from error
