"""Check that this machine can start the jails in which programs of the policy run."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.config.schema import Config
from relax_hpc.rewards.jail import Jail
from relax_hpc.tasks.jails import jail_settings


def check_programs(config: Config) -> Iterator[str]:
    """Start a jail as reward `code` and tool `python` would, if the run uses this machine.

    Yields a line for each that fails. Nodes of a cluster may differ from the machine that submits:
    `doctor --deep` checks them.
    """
    if config.layout != "local" or config.site.name:
        return
    try:
        programs = jail_settings(config)
    except ConfigError:
        return  # Another check names the wrong option of the tool.
    for key, settings in programs.items():
        try:
            Jail(settings, key)
        except RelaxError as error:
            yield str(error)
