"""Where a head is: the environment that Slurm gives a batch script, or what a leader gave its
standby."""

from __future__ import annotations

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.allocation import VARIABLE, Allocation, GroupNodes, node_name
from relax_hpc.config.schema import Config, GroupConfig

HET = {
    "SLURM_JOB_ID": "8",
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_ID_HET_GROUP_0": "8",
    "SLURM_JOB_ID_HET_GROUP_1": "9",
    "SLURM_JOB_ID_HET_GROUP_2": "10",
}


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")


def config_of(layout: str = "het") -> Config:
    """Hub, rollout and actor on two nodes each."""
    config = Config(layout=layout)
    config.rollout.replicas = config.actor.parallel.data = 2
    config.groups = {"hub": ["advantages"], "rollout": ["rollout"], "actor": ["actor"]}
    config.groups = {name: GroupConfig(roles=roles) for name, roles in config.groups.items()}
    for group in config.groups.values():
        group.resources.nodes = 2
    return config


def test_the_parts_of_a_heterogeneous_job_have_ids_of_their_own() -> None:
    here = Allocation.from_environment(config_of(), "", dict(HET))
    assert (here.job, here.restarts, here.batch_node, here.name, here.het) == (
        "8",
        0,
        "node1",
        "8-0",
        True,
    )
    assert here.group_nodes["hub"] == GroupNodes("8", 2, 0)
    assert {(place.job, place.het) for place in here.group_nodes.values()} == {
        ("8", 0),
        ("9", 1),
        ("10", 2),
    }


def test_lives_of_a_requeued_job_are_told_apart() -> None:
    here = Allocation.from_environment(
        config_of("jobs"), "actor", {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"}
    )
    assert here == Allocation("12", 2, "node1", {"actor": GroupNodes("12", 2)})
    assert here.name == "12-2" and not here.het


def test_a_member_has_the_size_of_its_group() -> None:
    here = Allocation.from_environment(config_of("jobs"), "rollout-3", {"SLURM_JOB_ID": "12"})
    assert here.group_nodes == {"rollout-3": GroupNodes("12", 2)}


def test_a_job_of_other_parts_than_configured_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"SLURM_HET_SIZE: found 2 components, but the configuration has 3 \("
    ):
        Allocation.from_environment(config_of(), "", HET | {"SLURM_HET_SIZE": "2"})


def test_a_job_by_hand_may_have_a_hub_of_its_own_where_the_site_has_no_nodes_for_it() -> None:
    config = config_of()
    config.site.cpu_nodes = False
    assert Allocation.from_environment(config, "", dict(HET)).group_nodes["hub"] == GroupNodes(
        "8", 2, 0
    )
    two = {"SLURM_JOB_ID": "8", "SLURM_HET_SIZE": "2"} | {
        f"SLURM_JOB_ID_HET_GROUP_{n}": str(8 + n) for n in (0, 1)
    }
    assert Allocation.from_environment(config, "", two).group_nodes["hub"] == GroupNodes(
        "8", 2, 0
    ), "it rides"
    with pytest.raises(ConfigError, match=r"SLURM_HET_SIZE: found 4 components"):
        Allocation.from_environment(config, "", HET | {"SLURM_HET_SIZE": "4"})


def test_outside_of_a_job_there_is_no_allocation() -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_ID: not set"):
        Allocation.from_environment(config_of(), "", {})


def test_a_standby_is_told_and_what_it_starts_does_not_inherit_that() -> None:
    leader = Allocation.from_environment(config_of(), "", dict(HET))
    environment = {"SLURM_JOB_ID": "8", "SLURMD_NODENAME": "node2"} | leader.variables()
    assert Allocation.from_environment(config_of(), "", environment) == leader
    assert VARIABLE not in environment


def test_a_node_is_called_what_slurm_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_name() == "node1"
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr("socket.gethostname", lambda: "n17.cluster.example")
    assert node_name() == "n17"
