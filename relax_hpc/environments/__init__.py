"""Environments for episodes of several turns, one file each, found by name.

`environment: {kind: ...}` names one of `ENVIRONMENTS`, or a user's class as `package.module:Class`.
This package does not import torch, and does not depend on engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_hpc.base.error_origin import describe_with_location, has_user_frame
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.plugins import load_plugin
from relax_hpc.base.signatures import describe_mismatch, method_of
from relax_hpc.environments.base import Environment

ENVIRONMENTS: dict[str, str] = {
    "tools": "relax_hpc.environments.with_tools:WithTools",
    "zoom": "relax_hpc.environments.zoom:ZoomIn",
    "reasoning_gym": "relax_hpc.environments.reasoning_gym:ReasoningGym",
    "gymnasium": "relax_hpc.environments.gymnasium:Gymnasium",
}
"""Name of a built-in environment -> its import path."""

_CALLED_WITH = {
    "reset": ("beginning",),
    "step": ("response",),
    "format_observation": ("observation",),
    "close": (),
}
"""Method of an environment -> its arguments."""


def environment_class(name: str) -> type[Environment]:
    """The class of environments called ``name``. ConfigError: it does not exist, or is not an
    environment."""
    kind: Any = load_plugin("environment.kind", name, ENVIRONMENTS)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(
            f"environment.kind: {name!r}: found no class derived from "
            "relax_hpc.environments.base.Environment"
        )
    missing = ", ".join(sorted(kind.__abstractmethods__))
    if missing:
        raise ConfigError(
            f"environment.kind: {name!r}: found a class without {missing}; define it there"
        )
    for method, names in _CALLED_WITH.items():
        function = method_of(kind, method)
        text = describe_mismatch(function, *names) if function else ""
        if text:
            raise ConfigError(f"environment.kind: {name!r}: {method} {text}")
    return kind


def make_environment(kind: type[Environment], options: Mapping[str, Any]) -> Environment:
    """A new environment. ConfigError: it cannot be made with these options."""
    try:
        return kind(**options)
    except TypeError as error:
        if has_user_frame(error):
            text = (
                f"environment.kind: {kind.__name__} cannot be made: {describe_with_location(error)}"
            )
            raise ConfigError(text) from error
        raise ConfigError(
            f"environment.options: {kind.__name__} is not made with them: {error}"
        ) from error


def try_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """An environment called ``name`` for a check, without an episode. ConfigError: it does not
    exist, or cannot be made."""
    try:
        return make_environment(environment_class(name), options)
    except ConfigError:
        raise
    except Exception as error:  # a user's class may raise anything
        text = f"environment.kind: {name!r}: cannot be made: {describe_with_location(error)}"
        raise ConfigError(text) from error


# Names in release 0.1.
made_with = make_environment
tried = try_environment
