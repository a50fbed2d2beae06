"""Settings of the rewards of a run, completed by the run's groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from relax_hpc.base.reward_settings import RewardSettings
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.groups import group_with_role
from relax_hpc.config.schema import Config


def reward_settings(config: Config) -> RewardSettings:
    """Settings of a run's rewards. If the run has a group with role genrm, and the settings name no
    other judge, the judge's endpoints are those of this group."""
    judge, group = config.reward.judge, group_with_role(config, "genrm")
    if not group or judge.url or judge.endpoints:
        return config.reward
    folder = RunDir(Path(config.run_dir)).rendezvous(group)
    return replace(config.reward, judge=replace(judge, endpoints=str(folder)))
