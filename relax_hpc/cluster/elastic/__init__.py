"""Elastic groups of engines: what operations want, compared with what runs, and brought about"""

from relax_hpc.cluster.elastic.layouts import make_local_reconciler, make_reconciler

__all__ = ["make_local_reconciler", "make_reconciler"]
