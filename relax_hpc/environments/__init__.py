"""Environments that episodes of several turns are played against, one file each, found by name.

`environment: {kind: ...}` names one of `ENVIRONMENTS`, or `package.module:Class` of a user's own.
Nothing here imports torch, or knows of engines.
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
"""Environments that are built in, by name: where each lies."""

_CALLED_WITH = {
    "reset": ("beginning",),
    "step": ("response",),
    "format_observation": ("observation",),
    "close": (),
}
"""Methods of an environment -> the arguments that they get."""


def environment_class(name: str) -> type[Environment]:
    """The class of environments called ``name``. ConfigError if there is none."""
    found = load_plugin("environment.kind", name, ENVIRONMENTS)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(
            f"environment.kind: {name!r}: found no class derived from "
            "relax_hpc.environments.base.Environment"
        )
    if missing := ", ".join(sorted(found.__abstractmethods__)):
        raise ConfigError(
            f"environment.kind: {name!r}: found a class without {missing}; give it that"
        )
    for method, names in _CALLED_WITH.items():
        called = method_of(found, method)
        text = describe_mismatch(called, *names) if called else ""
        if text:
            raise ConfigError(f"environment.kind: {name!r}: {method} {text}")
    return found


def made_with(kind: type[Environment], options: Mapping[str, Any]) -> Environment:
    """A new environment. ConfigError: it cannot be made of these options."""
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


def tried(name: str, options: Mapping[str, Any]) -> Environment:
    """One environment called ``name``, before there is an episode. ConfigError: there is none, or
    it cannot be made."""
    try:
        return made_with(environment_class(name), options)
    except ConfigError:
        raise
    except Exception as error:  # a user's own may raise anything
        text = f"environment.kind: {name!r}: cannot be made: {describe_with_location(error)}"
        raise ConfigError(text) from error
