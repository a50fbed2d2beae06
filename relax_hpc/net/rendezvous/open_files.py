"""Limits of open files of a process that listens, and of how many strangers may cost it."""

from __future__ import annotations

import resource
import sys

_KEPT = 64
"""Files that a process can open however many connect to it: journals, snapshots, shards."""


def connection_limit() -> int:
    """Raise the soft limit of files to the hard one; from which file number on a connection is one
    too many.

    The usual soft limit, 1024, is for programs that use select(). A system gives the lowest number
    that is free, so a connection that gets a higher one than this has come while almost all are
    taken.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard - min(_KEPT, hard // 4) if hard != resource.RLIM_INFINITY else sys.maxsize
