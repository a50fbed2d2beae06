"""Environments that episodes of several turns are played against, one file each, found by name.

`environment: {kind: ...}` names one of `ENVIRONMENTS`, or `package.module:Class` of a user's own. Nothing here imports
torch, or knows of engines.
"""

from __future__ import annotations

from relax_hpc.environments.base import Environment
from relax_hpc.errors import ConfigError
from relax_hpc.named import named

ENVIRONMENTS: dict[str, str] = {
    "tools": "relax_hpc.environments.with_tools:WithTools",
    "zoom": "relax_hpc.environments.zoom:ZoomIn",
    "reasoning_gym": "relax_hpc.environments.reasoning_gym:ReasoningGym",
    "gymnasium": "relax_hpc.environments.gymnasium:Gymnasium",
}
"""Environments that are built in, by name: where each lies."""


def environment_class(name: str) -> type[Environment]:
    """The class of environments called ``name``. ConfigError if there is none."""
    found = named("environment.kind", name, ENVIRONMENTS)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(
            f"environment.kind: {name!r}: found no class derived from relax_hpc.environments.base.Environment"
        )
    return found
