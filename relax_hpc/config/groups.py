"""The groups of a run by name, with the elastic members of rollout groups.

A group whose only role is rollout may have further members, `rollout-2`, `rollout-3`, ...: groups
with the same settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.gpus import device_variables
from relax_hpc.config.roles import RANKED, ROLES
from relax_hpc.config.schema import Config, GroupConfig, TrainerConfig

CONTROLLER = "controller"
"""Role of the process with the queue's controller, in the hub. It is not in `ROLES`."""
_MEMBER = re.compile(r"(.+)-([1-9]\d*)")


def base_name(name: str, groups: Collection[str]) -> str:
    """Return the configured group of ``name``, which is a group or a member; "" if there is no such
    group."""
    if name in groups:
        return name
    match = _MEMBER.fullmatch(name)
    return match[1] if match and match[1] in groups else ""


def group_settings(config: Config, name: str) -> GroupConfig:
    """Return the settings of a group or an elastic member. ConfigError: the run has no such
    group."""
    base = base_name(name, config.groups)
    if not base or (base != name and config.groups[base].roles != ["rollout"]):
        raise ConfigError(
            f"groups: found {name!r}, allowed: {', '.join(config.groups)}, or members like "
            "rollout-2"
        )
    return config.groups[base]


def group_environment(config: Config, name: str) -> dict[str, str]:
    """Return the environment variables of a group."""
    group = group_settings(config, name)
    variables = {**group.env, **device_variables(config, group)}
    if not group.code:
        return variables
    # Without PYTHONSAFEPATH Python looks first in the working directory, which may be a checkout.
    paths = [group.code, *filter(None, [group.env.get("PYTHONPATH")])]
    return variables | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def group_roles(config: Config, name: str) -> list[str]:
    """Return the roles of a group's processes. The first role of the hub is the queue
    controller."""
    return ([CONTROLLER] if name == "hub" else []) + list(group_settings(config, name).roles)


def roles_with_cpus(config: Config, name: str) -> list[str]:
    """Return the roles of a group for whose processes CPUs are requested."""
    roles = group_roles(config, name)
    return [role for role in roles if role not in ROLES or not ROLES[role].mostly_waits]


def groups_that_train(groups: Mapping[str, GroupConfig]) -> dict[str, str]:
    """Return the group of each role that trains, by role, in the order of `ROLES`.

    >>> groups_that_train({"hub": GroupConfig(roles=["advantages"]),
    ...              "training": GroupConfig(roles=["actor"])})
    {'actor': 'training'}
    """
    role_groups: dict[str, str] = {}
    for name, group in groups.items():
        role_groups |= dict.fromkeys(group.roles, name)
    trainers = [name for name, role in ROLES.items() if role.trains]
    return {name: role_groups[name] for name in trainers if name in role_groups}


def trainer_sections(config: Config) -> Iterator[tuple[str, TrainerConfig]]:
    """Sections of trainers whose role is in a group, and their settings."""
    placed = {"actor"}.union(groups_that_train(config.groups))
    yield from ((name, getattr(config, name)) for name in ("actor", "critic") if name in placed)


def rank_count(config: Config, name: str, role: str) -> int:
    """Return the number of processes of ``role`` in group ``name``."""
    if role in RANKED:
        return getattr(config, role).parallel.ranks
    if role == CONTROLLER or not ROLES[role].serves:
        return 1
    nodes = 1 if config.layout == "local" else group_settings(config, name).resources.nodes
    return nodes * (config.rollout.processes if role == "rollout" else 1)


def group_with_role(config: Config, role: str) -> str:
    """Return the name of the group with ``role``; "" if no group has it."""
    return next((name for name, group in config.groups.items() if role in group.roles), "")
