"""The srun options of a role that a site may choose, and those that are made from other
settings."""

from __future__ import annotations

import re

from relax_hpc.base.errors import Mistakes
from relax_hpc.config.schema import Config

OWN_OPTIONS = {
    "jobid": "",
    "het-group": "",
    "overlap": "",
    "exclusive": "",
    "exact": "",
    "nodes": "groups.<group>.resources.nodes",
    "ntasks": "the sizes of the group's roles",
    "ntasks-per-node": "the sizes of the group's roles",
    "cpus-per-task": "groups.<group>.resources.cpus_per_task",
    "mem": "groups.<group>.resources.memory",
    "gpus": "groups.<group>.resources.gpus_per_node",
    "gpus-per-node": "groups.<group>.resources.gpus_per_node",
    "mpi": "site.mpi.launcher",
    "export": "site.env",
    "job-name": "",
    "output": "",
    "error": "",
    "open-mode": "",
    "kill-on-bad-exit": "",
    "no-kill": "",
    "wait": "",
    "container-image": "site.container.image",
    "container-mounts": "site.container.mounts",
}
"""srun options that are made from other settings -> what to set instead, empty if there is
nothing."""
_LIMITS = "NOFILE,MEMLOCK,NPROC,STACK"
"""Limits, of those that `site.setup` sets, that steps inherit whatever the cluster's
PropagateResourceLimits."""
_LONG_NAME = re.compile(r"[a-z][a-z0-9-]*")


def srun_options(config: Config) -> list[str]:
    """Options of srun that place roles, and the site's own; ConfigError for all that is not the
    site's to choose.

    Ranks fill a node before the next one, and its sockets in order. Each step has all cores of its
    group on the node: the ranks divide them (`relax_hpc.net.rendezvous.affinity`), unless the site
    has Slurm do it.
    """
    site, mistakes = config.site, Mistakes()
    for name, value in site.srun_options.items():
        if name in OWN_OPTIONS:
            instead = (
                f"set {OWN_OPTIONS[name]} instead" if OWN_OPTIONS[name] else "it cannot be changed"
            )
            mistakes.add(
                f"site.srun_options.{name}: found {value!r}, but it is set by relax_hpc; {instead}"
            )
        elif not _LONG_NAME.fullmatch(name) or not value.isprintable():
            mistakes.add(
                f"site.srun_options: found {name!r}: {value!r}, allowed: the long name of an srun "
                "option, without dashes before, and a value without line breaks"
            )
    mistakes.raise_if_any()
    options = {"distribution": "block:block", "cpu-bind": "none"} | site.srun_options
    return [
        *limits(config),
        *(_option(name, value) for name, value in options.items() if name != "propagate"),
    ]


def limits(config: Config) -> list[str]:
    """Options of srun for the limits that a step inherits from who starts it; none where the
    cluster's way will do."""
    options = {"propagate": _LIMITS} if config.site.setup else {}
    options |= {
        name: value for name, value in config.site.srun_options.items() if name == "propagate"
    }
    return [_option(name, value) for name, value in options.items()]


def _option(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"
