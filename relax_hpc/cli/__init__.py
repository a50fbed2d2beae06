"""`relax-hpc`: the commands."""

from relax_hpc.cli.program import main

__all__ = ["main"]
