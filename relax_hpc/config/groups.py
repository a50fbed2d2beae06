"""The groups of a run by name, elastic members of a rollout group included.

A group whose only role is rollout may have further members, `rollout-2`, `rollout-3`, ...: groups
with its settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.roles import RANKED, ROLES
from relax_hpc.config.schema import Config, GroupConfig

CONTROLLER = "controller"
"""Role of the process with the queue's controller, in the hub: no role of the data flow."""
_MEMBER = re.compile(r"(.+)-([1-9]\d*)")


def base_name(name: str, groups: Collection[str]) -> str:
    """The configured group that ``name`` is or is a member of; empty if there is none."""
    if name in groups:
        return name
    match = _MEMBER.fullmatch(name)
    return match[1] if match and match[1] in groups else ""


def group_of(config: Config, name: str) -> GroupConfig:
    """Settings of a group or of an elastic member; ConfigError if the run has no such group."""
    base = base_name(name, config.groups)
    if not base or (base != name and config.groups[base].roles != ["rollout"]):
        raise ConfigError(
            f"groups: found {name!r}, allowed: {', '.join(config.groups)}, or members like "
            "rollout-2"
        )
    return config.groups[base]


def variables_of(config: Config, name: str) -> dict[str, str]:
    """Environment variables of a group's own."""
    group = group_of(config, name)
    if not group.code:
        return dict(group.env)
    # Python would look in the working directory first, which may be a checkout.
    paths = [group.code, *filter(None, [group.env.get("PYTHONPATH")])]
    return group.env | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def roles_of(config: Config, name: str) -> list[str]:
    """The roles that a group's processes run; the hub's first is the queue controller."""
    return ([CONTROLLER] if name == "hub" else []) + list(group_of(config, name).roles)


def trainers_of(groups: Mapping[str, GroupConfig]) -> dict[str, str]:
    """Roles that train, in the order of `ROLES`, and the group that each is in.

    >>> trainers_of({"hub": GroupConfig(roles=["advantages"]), "training":
    ...     GroupConfig(roles=["actor"])})
    {'actor': 'training'}
    """
    placed = {role: name for name, group in groups.items() for role in group.roles}
    return {name: placed[name] for name, role in ROLES.items() if role.trains and name in placed}


def ranks_of(config: Config, name: str, role: str) -> int:
    """Processes that ``role`` has in group ``name``."""
    if role in RANKED:
        return getattr(config, role).parallel.ranks
    if role == CONTROLLER or not ROLES[role].serves:
        return 1
    nodes = 1 if config.layout == "local" else group_of(config, name).resources.nodes
    return nodes * (config.rollout.processes if role == "rollout" else 1)


def group_with(config: Config, role: str) -> str:
    """Name of the group that has ``role``; empty: none has."""
    return next((name for name, group in config.groups.items() if role in group.roles), "")
