"""Slurm job around this process, and which of its parts holds which group."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.layout import Component, components
from relax_hpc.config import Config
from relax_hpc.config.groups import group_of

VARIABLE = "RELAX_ALLOCATION"
"""Environment variable that carries an allocation to a step: Slurm tells a step neither its het
number nor the job of its component."""


@dataclass(frozen=True, slots=True)
class Place:
    """The nodes of a group."""

    job: str
    """Id under which Slurm lists them; a component of a het job has its own."""
    nodes: int
    """Number of nodes, as many as were asked for."""
    het: int | None = None
    """Number of the component; None: an ordinary job."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job, by whose id its steps are started, and the places of the groups in it."""

    job: str
    restarts: int
    batch_node: str
    places: dict[str, Place]

    @property
    def name(self) -> str:
        """Name that differs between the lives of a requeued job."""
        return f"{self.job}-{self.restarts}"

    @property
    def het(self) -> bool:
        return any(place.het is not None for place in self.places.values())

    def variables(self) -> dict[str, str]:
        """Variables by which a step finds its allocation."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def here(
        cls, config: Config, group: str, environment: MutableMapping[str, str] = os.environ
    ) -> Allocation:
        """Allocation of this process, a batch script's or one that its step was given; ConfigError
        outside of a job."""
        # Taken out, as jobs that are submitted from here inherit the environment.
        if text := environment.pop(VARIABLE, ""):
            value = json.loads(text)
            return cls(
                **value
                | {"places": {name: Place(**place) for name, place in value["places"].items()}}
            )
        job = environment.get("SLURM_JOB_ID")
        if not job:
            raise ConfigError(
                "SLURM_JOB_ID: not set, so this is no Slurm job; submit with relax-hpc submit, or "
                "sbatch"
            )
        restarts = int(environment.get("SLURM_RESTART_COUNT", 0))
        return cls(job, restarts, node_name(), _places(config, group, job, environment))


def node_name() -> str:
    """Name of this node in Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def _places(
    config: Config, group: str, job: str, environment: Mapping[str, str]
) -> dict[str, Place]:
    if group:
        return {group: Place(job, group_of(config, group).resources.nodes)}
    parts = _parts(config, int(environment.get("SLURM_HET_SIZE", "1")))
    if environment.get("SLURM_HET_SIZE", "1") == "1":
        return {name: Place(job, parts[0].nodes) for part in parts for name in part.groups}
    jobs = [environment[f"SLURM_JOB_ID_HET_GROUP_{number}"] for number in range(len(parts))]
    return {
        name: Place(jobs[number], part.nodes, number)
        for number, part in enumerate(parts)
        for name in part.groups
    }


def _parts(config: Config, size: int) -> list[Component]:
    """The components of this job. That of a script by hand may have a hub of its own although the
    site has no nodes for it: what was waited for is used."""
    parts = components(config)
    if size in (1, len(parts)):
        return parts
    if not config.site.cpu_nodes:
        own = components(replace(config, site=replace(config.site, cpu_nodes=True)))
        if size == len(own):
            return own
    raise ConfigError(
        f"SLURM_HET_SIZE: found {size} components, but the configuration has {len(parts)} "
        f"({', '.join(part.name for part in parts)}); submit the script that was rendered for it"
    )
