"""Handlers of requests, `(service, request, **arguments)`, registered by the request's `op`.

They check, record what changes, and answer; or raise Refused, or NotYet with what the request waits
for.
"""

from relax_hpc.queue.controller.handlers import (
    claims,
    device_turns,
    media,
    members,
    rows,
    segments,
    status,
    tickets,
    training,
    weights,
)
from relax_hpc.queue.controller.registry import HANDLERS

__all__ = [
    "HANDLERS",
    "claims",
    "device_turns",
    "media",
    "members",
    "rows",
    "segments",
    "status",
    "tickets",
    "training",
    "weights",
]
