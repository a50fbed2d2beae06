"""The Slurm job around this process, and the nodes of each group in it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.layout import Component, components
from relax_hpc.config import Config
from relax_hpc.config.groups import group_settings

VARIABLE = "RELAX_ALLOCATION"
"""Environment variable that carries an allocation to a step."""
# Slurm 22.05 sets no variable that names the component of a step: SLURM_JOB_ID is the leader's id
# in every component, and SLURM_HET_JOB_ID is not set at all.


@dataclass(frozen=True, slots=True)
class GroupNodes:
    """The nodes of a group."""

    job: str
    """Job id of the nodes. A component of a heterogeneous job has its own id."""
    nodes: int
    """Number of nodes that were requested."""
    het: int | None = None
    """Number of the component; None: an ordinary job."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job and the nodes of the groups in it. Steps are started by the id of this job."""

    job: str
    restarts: int
    batch_node: str
    group_nodes: dict[str, GroupNodes]

    @property
    def name(self) -> str:
        """Id of the job with its number of restarts, because a requeued job keeps its id."""
        return f"{self.job}-{self.restarts}"

    @property
    def het(self) -> bool:
        return any(nodes.het is not None for nodes in self.group_nodes.values())

    def variables(self) -> dict[str, str]:
        """Environment variables from which a step reads its allocation."""
        value = asdict(self)
        value["places"] = value.pop("group_nodes")
        return {VARIABLE: json.dumps(value)}

    @classmethod
    def from_environment(
        cls, config: Config, group: str, environment: MutableMapping[str, str] = os.environ
    ) -> Allocation:
        """Allocation of this process: that of the batch script, or the one in `VARIABLE` of a
        step. ConfigError outside of a job."""
        # The variable is removed, because jobs that this process submits inherit the environment.
        text = environment.pop(VARIABLE, "")
        if text:
            value = json.loads(text)
            nodes = value.pop("places")
            group_nodes = {name: GroupNodes(**fields) for name, fields in nodes.items()}
            return cls(**value, group_nodes=group_nodes)
        job = environment.get("SLURM_JOB_ID")
        if not job:
            raise ConfigError(
                "SLURM_JOB_ID: not set, so this is no Slurm job; submit with relax-hpc submit, or "
                "sbatch"
            )
        restarts = int(environment.get("SLURM_RESTART_COUNT", 0))
        return cls(job, restarts, node_name(), _read_group_nodes(config, group, job, environment))


def node_name() -> str:
    """Name of this node in Slurm."""
    # slurmd sets SLURMD_NODENAME in every task. The host name may differ: it can have a domain, and
    # all nodes of a sandbox share one.
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def _read_group_nodes(
    config: Config, group: str, job: str, environment: Mapping[str, str]
) -> dict[str, GroupNodes]:
    if group:
        return {group: GroupNodes(job, group_settings(config, group).resources.nodes)}
    size = int(environment.get("SLURM_HET_SIZE", "1"))
    job_components = _match_components(config, size)
    group_nodes: dict[str, GroupNodes] = {}
    for number, component in enumerate(job_components):
        if environment.get("SLURM_HET_SIZE", "1") == "1":
            nodes = GroupNodes(job, job_components[0].nodes)
        else:
            component_job = environment[f"SLURM_JOB_ID_HET_GROUP_{number}"]
            nodes = GroupNodes(component_job, component.nodes, number)
        group_nodes |= dict.fromkeys(component.groups, nodes)
    return group_nodes


def _match_components(config: Config, size: int) -> list[Component]:
    """The components of this job, which has ``size`` of them. A script that was submitted by hand
    may have a separate hub although the site has no CPU nodes; then the hub uses its nodes."""
    configured = components(config)
    if size in (1, len(configured)):
        return configured
    if not config.site.cpu_nodes:
        with_hub = components(replace(config, site=replace(config.site, cpu_nodes=True)))
        if size == len(with_hub):
            return with_hub
    names = ", ".join(component.name for component in configured)
    raise ConfigError(
        f"SLURM_HET_SIZE: found {size} components, but the configuration has {len(configured)} "
        f"({names}); submit the script that was rendered for it"
    )
