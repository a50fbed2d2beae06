"""The srun options of a step: those that relax_hpc writes, changed by the site and the group."""

from __future__ import annotations

import re
from collections.abc import Sequence

from relax_hpc.base.errors import Mistakes
from relax_hpc.cluster.slurm.own_options import SRUN, changes_by_setting, check_changes
from relax_hpc.config.groups import group_settings
from relax_hpc.config.schema import Config

_LIMITS = "NOFILE,MEMLOCK,NPROC,STACK"
"""Resource limits set by `site.setup` that steps must inherit."""
_PLUGIN = re.compile(r"[a-z][a-z0-9_]*")


def check_srun_options(config: Config) -> None:
    """ConfigError for changes of srun options that are not allowed, with all mistakes."""
    mistakes = Mistakes()
    for key, changes in changes_by_setting(SRUN, config).items():
        check_changes(SRUN, key, changes, mistakes)
    launcher = config.site.mpi.launcher
    if not _PLUGIN.fullmatch(launcher):
        mistakes.add(
            f"site.mpi.launcher: found {launcher!r}, allowed: mpiexec, or a plugin that "
            "srun --mpi=list shows"
        )
    mistakes.raise_if_any()


def changed_srun(command: Sequence[str], config: Config, group: str) -> list[str]:
    """``command`` with the changes of the site and of ``group``. Its first argument is srun, the
    others are options with long names.

    >>> from relax_hpc.config.schema import GroupConfig
    >>> config = Config(groups={"actor": GroupConfig()})
    >>> config.site.srun_options = {"mem": None, "cpu-freq": "high"}
    >>> config.groups["actor"].resources.srun_options = {"wait": "60"}
    >>> changed_srun(["srun", "--overlap", "--mem=0", "--wait=0"], config, "actor")
    ['srun', '--overlap', '--wait=60', '--cpu-freq=high']
    """
    changes = srun_changes(config, group)
    changed = [command[0]]
    for argument in command[1:]:
        name = argument.removeprefix("--").partition("=")[0]
        if name not in changes:
            changed.append(argument)
            continue
        value = changes.pop(name)
        if value is not None:
            changed.append(_option(name, value))
    added = {name: value for name, value in changes.items() if value is not None}
    return changed + [_option(name, value) for name, value in added.items()]


def srun_changes(config: Config, group: str) -> dict[str, str | None]:
    """Changes of srun options for the steps of ``group``: of the site, of its kind of nodes, and of
    the group itself. None removes an option."""
    site, resources = config.site, group_settings(config, group).resources
    of_kind = site.gpu_srun_options if resources.gpus_per_node else site.cpu_srun_options
    return {**site.srun_options, **of_kind, **resources.srun_options}


def placing_options(config: Config) -> list[str]:
    """Options of srun that place the ranks of a role and pass on its resource limits.

    Ranks fill one node before the next, and its sockets in order. Each step has all cores of its
    group on the node, and the ranks divide them (`relax_hpc.net.rendezvous.affinity`), unless the
    site lets Slurm bind them.
    """
    return [*limit_options(config), "--distribution=block:block", "--cpu-bind=none"]


def limit_options(config: Config) -> list[str]:
    """Options of srun for the resource limits that a step inherits. Empty if the site has no
    setup."""
    # The cluster's PropagateResourceLimits may be NONE. Steps would then not have the limits that
    # site.setup sets in the batch script.
    return [f"--propagate={_LIMITS}"] if config.site.setup else []


def _option(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"
