"""Changes of the state by journal records: appliers, `(state, **record)`, registered by the
record's `op`.

They only change; whether a record may be written is decided before (`controller.handlers`,
`controller.planning`).
"""

from relax_hpc.queue.controller.changes import (
    admission,
    device_turns,
    leases,
    media,
    members,
    rows,
    segments,
    training,
    weights,
)
from relax_hpc.queue.controller.registry import APPLIERS

__all__ = [
    "APPLIERS",
    "admission",
    "device_turns",
    "leases",
    "media",
    "members",
    "rows",
    "segments",
    "training",
    "weights",
]
