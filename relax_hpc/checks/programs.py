"""Programs of the policy that a run would run."""

from __future__ import annotations

from relax_hpc.config.schema import Config
from relax_hpc.environments.tools import options_of, python
from relax_hpc.reward_settings import CodeSettings
from relax_hpc.rewards.composed import parts_of


def programs_of(config: Config) -> dict[str, CodeSettings]:
    """Settings by which programs are run, in training or in evaluations, by their keys."""
    names = (config.rollout.reward, config.eval.reward)
    found = {}
    if any(leaf == "code" for name in names if name for _, leaf in parts_of(name, config.reward)):
        found["reward.code"] = config.reward.code
    if (options := options_of("python", config.environment.options)) is not None:
        found[python.KEY] = python.settings_of(options)
    return found
