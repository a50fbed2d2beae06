"""Handlers of requests, `(service, request, **arguments)`, registered by the request's `op`.

A handler checks the request, records changes, and returns the answer. It raises Refused, or NotYet
with the topic for which the request has to wait.
"""

from relax_hpc.queue.controller.handlers import (
    claims,
    device_turns,
    media,
    members,
    operations,
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
    "operations",
    "rows",
    "segments",
    "status",
    "tickets",
    "training",
    "weights",
]
