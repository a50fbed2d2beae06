"""A control group of a program: a limit on the memory of all its processes together.

It counts memory that the limits of a process (`setrlimit`) do not count: shared memory, files in
memory, buffers of pipes and sockets. It needs a part of the cgroup v2 tree that the system has
delegated to this user, like systemd does below `user@UID.service`. See
Documentation/admin-guide/cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_REMOVE_S, _PAUSE_S = 5.0, 0.01
"""Seconds until the last process of a killed program must have ended, and between two checks."""
_numbers = itertools.count()


@contextlib.contextmanager
def limited_group(memory_mb: int, processes: int) -> Iterator[int]:
    """A new control group; yields a descriptor of its `cgroup.procs`, with which a process joins
    the group. -1: no group can be made.

    ``processes``: maximum number of processes and threads in the group. The group is removed at the
    end of the context.
    """
    group = _make_group(memory_mb, processes)
    if not group:
        yield -1
        return
    try:
        descriptor = os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        _remove_group(group)


def _make_group(memory_mb: int, processes: int) -> Path | None:
    parent = delegated_parent()
    if not parent:
        return None
    group = parent / f"relax-program-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
        (group / "memory.max").write_text(str(memory_mb << 20))
        # If the limit is exceeded, the kernel kills all processes of the group, not only the
        # largest one.
        (group / "memory.oom.group").write_text("1")
    except OSError:
        # The system may limit the number of groups.
        _remove_group(group)
        return None
    for name, limit in (("memory.swap.max", 0), ("pids.max", processes)):
        # The system may have no swap, or may not have delegated the controller `pids`.
        with contextlib.suppress(OSError):
            (group / name).write_text(str(limit))
    return group


@functools.cache
def delegated_parent(
    mount: Path = _MOUNT, process: Path = Path("/proc/self/cgroup")
) -> Path | None:
    """Folder in which this process may make groups with a memory limit, and move its children into
    them; None: there is no such folder.

    It is the parent of this process's group. In cgroup v2, a group that has processes cannot set
    limits for groups below it.
    """
    try:
        lines = process.read_text().splitlines()
        path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
        parent = (mount / path.lstrip("/")).parent
        if path == "/" or ".." in Path(path).parts or not parent.is_relative_to(mount):
            return None
        has_memory = "memory" in (parent / "cgroup.subtree_control").read_text().split()
    except OSError:
        return None
    is_delegated = os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK)
    return parent if has_memory and is_delegated else None


def _remove_group(group: Path) -> None:
    """Kill all processes of a group, and remove the group after they have ended.

    With `weak`, a program may have processes in other sessions, which are still running.
    """
    deadline = time.monotonic() + _REMOVE_S
    # Linux before 5.14 has no cgroup.kill.
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(_PAUSE_S)
