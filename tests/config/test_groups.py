"""Groups by name: what is configured, and elastic members of rollout groups."""

from __future__ import annotations

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.groups import base_name, group_roles, group_settings, rank_count
from relax_hpc.config.schema import Config, GroupConfig


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("rollout", "rollout"),
        ("rollout-2", "rollout"),
        ("rollout-10", "rollout"),
        ("rollout-0", ""),
        ("rollout-02", ""),
        ("rollout-", ""),
        ("rollout-2-3", ""),
        ("engine-2", "engine-2"),
        ("engine-2-3", "engine-2"),
        ("engine-3", ""),
        ("other", ""),
        ("", ""),
    ],
)
def test_members_belong_to_the_group_they_are_named_after(name: str, base: str) -> None:
    assert base_name(name, ["rollout", "engine-2"]) == base


def test_only_groups_that_roll_out_and_nothing_else_have_members() -> None:
    config = Config()
    assert group_settings(config, "rollout-2") is config.groups["rollout"]
    for name in ("actor-2", "hub-2", "nothing"):
        with pytest.raises(
            ConfigError, match=f"groups: found '{name}', allowed: .*members like rollout-2"
        ):
            group_settings(config, name)
    config.groups["rollout"].roles.append("reference")
    with pytest.raises(ConfigError):
        group_settings(config, "rollout-2")


def test_the_hub_runs_the_controller_first() -> None:
    config = Config()
    config.groups["hub"] = GroupConfig(roles=["advantages"])
    assert group_roles(config, "hub") == ["controller", "advantages"]
    assert group_roles(config, "rollout-7") == ["rollout"]


def test_ranks_are_the_models_or_the_nodes() -> None:
    config = Config()
    config.actor.parallel.data = 3
    config.groups["rollout"].resources.nodes = 4
    assert rank_count(config, "actor", "actor") == 3
    assert rank_count(config, "hub", "controller") == 1
    assert rank_count(config, "rollout-2", "rollout") == 1, "one process on the user's machine"
    config.layout = "het"
    assert rank_count(config, "rollout-2", "rollout") == 4
