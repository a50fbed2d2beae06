"""Programs of the policy that a run would run, and whether this machine can run them."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.reward_settings import CodeSettings
from relax_hpc.config.schema import Config
from relax_hpc.environments.tools import options_of, python
from relax_hpc.rewards.composed import parts_of
from relax_hpc.rewards.jail import Jail


def check_programs(config: Config) -> Iterator[str]:
    """Run a program as reward `code` and tool `python` would, if this machine is the run's node.

    Yields a line for each of them that cannot. Nodes of a cluster may differ from the machine that
    submits: `doctor --deep` checks them.
    """
    if config.layout != "local" or config.site.name:
        return
    try:
        programs = programs_of(config)
    except ConfigError:
        return  # Another check names the wrong option of the tool.
    for key, settings in programs.items():
        try:
            Jail(settings, key)
        except RelaxError as error:
            yield str(error)


def programs_of(config: Config) -> dict[str, CodeSettings]:
    """Settings of the jails of a run, for training and for evaluations, by their keys.

    ConfigError: an option of the tool `python` is not allowed.
    """
    names = (config.rollout.reward, config.eval.reward)
    programs = {}
    if any(leaf == "code" for name in names if name for _, leaf in parts_of(name, config.reward)):
        programs["reward.code"] = config.reward.code
    if (options := options_of("python", config.environment.options)) is not None:
        programs[python.KEY] = python.settings_of(options)
    return programs
