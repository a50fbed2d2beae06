"""Jails of a run: which parts of it run programs of the policy, and with which settings."""

from __future__ import annotations

from relax_hpc.base.reward_settings import CodeSettings
from relax_hpc.config.schema import Config
from relax_hpc.environments.tools import options_of, python
from relax_hpc.rewards.composed import parts_of


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


def needs_namespaces(config: Config) -> bool:
    """Whether a jail of the run is made of namespaces, and refuses nodes without them."""
    return any(not jail.image and not jail.weak for jail in jail_settings(config).values())
