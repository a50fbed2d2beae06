"""A private Slurm cluster with several nodes on one machine, for first runs and for tests. It runs
Slurm's real daemons."""

from relax_hpc.cluster.sandbox.cluster import Sandbox, down, up
from relax_hpc.cluster.sandbox.options import Options

__all__ = ["Options", "Sandbox", "down", "up"]
