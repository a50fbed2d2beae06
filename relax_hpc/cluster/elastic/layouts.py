"""The reconciler of each layout."""

from __future__ import annotations

from relax_hpc.cluster.elastic.local_members import LocalMembers
from relax_hpc.cluster.elastic.reconciler import Reconciler
from relax_hpc.cluster.elastic.slurm_members import SlurmMembers
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.config.groups import group_with_role

_SLURM_PAUSE_S, _SLURM_IDLE_S = 3.0, 30.0
"""Seconds between two questions to slurmctld, which serves the whole cluster: while an operation is
unfinished, and otherwise."""


def make_local_reconciler(supervisor: Supervisor) -> Reconciler | None:
    """Reconciler of a run on this machine; None: the run has no engines or no service."""
    group = group_with_role(supervisor.config, "rollout")
    if not group or not supervisor.config.service.enabled:
        return None
    return Reconciler(supervisor, group, LocalMembers(supervisor, group))


def make_reconciler(supervisor: Supervisor, slurm: Slurm) -> Reconciler | None:
    """Reconciler of a run in Slurm jobs; None: the run has no engines or no service."""
    config = supervisor.config
    if config.layout == "local":
        return make_local_reconciler(supervisor)
    group = group_with_role(config, "rollout")
    if not group or not config.service.enabled:
        return None
    members = SlurmMembers(supervisor.run, config, slurm, group)
    return Reconciler(supervisor, group, members, _SLURM_PAUSE_S, _SLURM_IDLE_S)
