"""A private, real Slurm of several nodes on one machine: to try the toolkit on, and for its
tests."""

from relax_hpc.cluster.sandbox.cluster import Sandbox, down, up
from relax_hpc.cluster.sandbox.options import Options

__all__ = ["Options", "Sandbox", "down", "up"]
