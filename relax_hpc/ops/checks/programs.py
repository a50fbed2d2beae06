"""Check that this machine can start the jails in which programs of the policy run."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.reward_settings import CodeSettings
from relax_hpc.config.schema import Config
from relax_hpc.environments.tools import options_of, python
from relax_hpc.rewards.composed import parts_of
from relax_hpc.rewards.jail import Jail


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


def jail_settings(config: Config) -> dict[str, CodeSettings]:
    """Settings of the jails of a run, for training and for evaluations, by their keys.

    ConfigError: an option of the tool `python` is not allowed.
    """
    jails = {}
    for name in (config.rollout.reward, config.eval.reward):
        leaves = [leaf for _, leaf in parts_of(name, config.reward)] if name else []
        if "code" in leaves:
            jails["reward.code"] = config.reward.code
    options = options_of("python", config.environment.options)
    if options is not None:
        jails[python.KEY] = python.settings_of(options)
    return jails
