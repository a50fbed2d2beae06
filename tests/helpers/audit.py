"""The audit of a run by row id, as the product has it."""

from relax_hpc.queue.inspect.audit import Audit, audit, next_version, read_events

__all__ = ["Audit", "audit", "next_version", "read_events"]
