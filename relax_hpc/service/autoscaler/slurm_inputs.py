"""Inputs of the autoscaler from Slurm: idle nodes of the rollout's partition, and the time that the
run's job has left."""

from __future__ import annotations

import os
import time

from relax_hpc.cluster.slurm.commands import Slurm, SlurmError, SlurmNode
from relax_hpc.config.groups import group_with_role
from relax_hpc.config.schema import Config

_ASK_S = 30.0
"""Seconds between two questions to slurmctld, which serves the whole cluster."""
_IDLE = "idle"
"""State of a node that a job can have now. A flag after it, such as `*` of a node that does not
answer or `~` of one that is switched off, excludes the node."""


class SlurmInputs:
    """Newest answers of Slurm; None: unknown, also in layout `local`."""

    def __init__(self, config: Config, slurm: Slurm | None = None, job: str | None = None) -> None:
        self._config = config
        self._slurm = slurm or Slurm(timeout_s=10.0, tries=1)
        self._job = os.environ.get("SLURM_JOB_ID", "") if job is None else job
        self._asked_at = float("-inf")
        self._job_ends_at: float | None = None
        self.idle_nodes: int | None = None

    @property
    def job_time_left_s(self) -> float | None:
        if self._job_ends_at is None:
            return None
        return max(0.0, self._job_ends_at - time.time())

    def update(self) -> None:
        """Ask Slurm if the answers are old. It may take 20 s. If Slurm does not answer, the values
        become unknown."""
        if self._config.layout == "local" or time.monotonic() - self._asked_at < _ASK_S:
            return
        self._asked_at = time.monotonic()
        self.idle_nodes = self._job_ends_at = None
        try:
            self.idle_nodes = count_idle_nodes(self._config, self._slurm.nodes())
            job = self._slurm.jobs(self._job).get(self._job) if self._job else None
        except SlurmError as error:
            print(f"autoscaler: {error}", flush=True)
            return
        if job and job.time_left_s is not None:
            self._job_ends_at = time.time() + job.time_left_s


def count_idle_nodes(config: Config, nodes: list[SlurmNode]) -> int:
    """Idle nodes of the partition of the rollout's jobs that have enough GPUs."""
    group = config.groups[group_with_role(config, "rollout")]
    partition = group.resources.options.get("partition") or config.site.partition
    gpus = group.resources.gpus_per_node
    names = set[str]()
    for node in nodes:
        # sinfo 22.05 marks the default partition by an asterisk.
        default = node.partition.endswith("*")
        in_partition = node.partition.rstrip("*") == partition if partition else default
        if in_partition and node.state == _IDLE and node.count_gpus() >= gpus:
            names.add(node.name)
    return len(names)
