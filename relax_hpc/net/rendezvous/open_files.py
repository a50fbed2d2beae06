"""Limit of the open files of a process that accepts connections."""

from __future__ import annotations

import resource
import sys

_RESERVED = 64
"""Descriptors that connections never take: for journals, snapshots and shards."""


def connection_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns the first descriptor that a
    connection must not have.

    The kernel assigns the lowest free descriptor. If a connection gets a higher one than this,
    almost all descriptors are in use, and it should be closed.
    """
    # The usual soft limit, 1024, exists for programs that use select(2), which has no larger
    # descriptors.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard - min(_RESERVED, hard // 4) if hard != resource.RLIM_INFINITY else sys.maxsize
