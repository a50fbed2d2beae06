"""The srun options of a role: those that a site may choose, and those that relax_hpc derives from
other settings."""

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
"""srun options that relax_hpc derives from other settings -> the setting to use instead, or
empty."""
_LIMITS = "NOFILE,MEMLOCK,NPROC,STACK"
"""Resource limits set by `site.setup` that steps must inherit."""
_LONG_NAME = re.compile(r"[a-z][a-z0-9-]*")


def srun_options(config: Config) -> list[str]:
    """Options of srun that place the ranks of a role, and the options of the site. ConfigError for
    options that a site must not set.

    Ranks fill one node before the next, and its sockets in order. Each step has all cores of its
    group on the node, and the ranks divide them (`relax_hpc.net.rendezvous.affinity`), unless the
    site lets Slurm bind them.
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
        *limit_options(config),
        *(_option(name, value) for name, value in options.items() if name != "propagate"),
    ]


def limit_options(config: Config) -> list[str]:
    """Options of srun for the resource limits that a step inherits. Empty if the site has no setup
    and no own choice."""
    # The cluster's PropagateResourceLimits may be NONE. Steps would then not have the limits that
    # site.setup sets in the batch script.
    options = {"propagate": _LIMITS} if config.site.setup else {}
    options |= {
        name: value for name, value in config.site.srun_options.items() if name == "propagate"
    }
    return [_option(name, value) for name, value in options.items()]


def _option(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"
