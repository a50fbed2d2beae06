"""A control group of a program: a limit on the memory of all its processes together.

It counts what limits of a process do not: shared memory, files in memory, buffers of pipes and
sockets. It needs a part of the cgroup v2 tree that the system has delegated to this user, as
systemd does below `user@UID.service`. See Documentation/admin-guide/cgroup-v2.rst of Linux.
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
"""Seconds for the last process of a killed program to be gone, and between two looks."""
_numbers = itertools.count()


@contextlib.contextmanager
def limited_group(memory_mb: int, processes: int) -> Iterator[int]:
    """A new group; a descriptor of its `cgroup.procs`, by which a process joins. -1 where no group
    can be made.

    ``processes``: processes and threads that the group may have. The end of the context removes it.
    """
    group = _make(memory_mb, processes)
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
        _remove(group)


def _make(memory_mb: int, processes: int) -> Path | None:
    if not (parent := delegated_parent()):
        return None
    group = parent / f"relax-program-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
        (group / "memory.max").write_text(str(memory_mb << 20))
        # All processes of the program end, not the largest alone.
        (group / "memory.oom.group").write_text("1")
    except OSError:  # the system bounds the number of groups
        _remove(group)
        return None
    for name, limit in (("memory.swap.max", 0), ("pids.max", processes)):
        # The system may have no swap, and may not have delegated the other controller.
        with contextlib.suppress(OSError):
            (group / name).write_text(str(limit))
    return group


@functools.cache
def delegated_parent(
    mount: Path = _MOUNT, process: Path = Path("/proc/self/cgroup")
) -> Path | None:
    """Folder in which this process may make groups with a memory limit, and move its children
    there.

    It is the parent of this process's own group: a group with processes can have no limits for
    groups below it.
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


def _remove(group: Path) -> None:
    """Kill all processes of a group, and remove the group when they are gone.

    A weak program may have started processes in other sessions, which still live.
    """
    deadline = time.monotonic() + _REMOVE_S
    with contextlib.suppress(OSError):  # Linux before 5.14 has no such file
        (group / "cgroup.kill").write_text("1")
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(_PAUSE_S)
