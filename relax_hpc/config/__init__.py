"""The configuration of a run: schema, loading, checks."""

from relax_hpc.config.load import dump, load, load_resolved, resolve, to_dict
from relax_hpc.config.schema import Config

__all__ = ["Config", "dump", "load", "load_resolved", "resolve", "to_dict"]
