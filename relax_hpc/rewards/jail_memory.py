"""Limit on the memory of all processes of a program together, for systems without a delegated
control group.

A thread adds up the memory of the processes, and kills the program if it exceeds the limit. A
program may exceed the limit for some hundredths of a second. During that time `RLIMIT_AS` still
limits each of its processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PAUSE_S = 0.02
_MAX_SHARE = 0.2
"""Maximum share of a processor that the thread uses."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UNCOUNTED_FILES = 256
"""Number of open files up to which the sockets of a program are not counted."""
_SOCKET_BYTES = 425_984
"""Maximum number of bytes in a socket: twice net.core.wmem_max of Linux, 212,992, which the kernel
allows with its overhead. /proc does not show the present number."""


class MemoryWatch:
    """State of a watched program, made by `watched_memory`."""

    def __init__(self) -> None:
        self.has_killed = False
        """Whether the program needed too much memory."""


@contextlib.contextmanager
def watched_memory(
    pid: int, own_levels: int, limit_bytes: int, kill: Callable[[], None]
) -> Iterator[MemoryWatch]:
    """Context that calls ``kill`` as soon as a program has more than ``limit_bytes``.

    ``pid``: ancestor of the program. ``own_levels``: number of generations, from ``pid`` on, that
    are not part of the program.
    """
    watch, end = MemoryWatch(), threading.Event()

    def observe() -> None:
        pause_s = _PAUSE_S
        while not end.wait(pause_s):
            begin_s = time.monotonic()
            if program_bytes(pid, own_levels, limit_bytes) > limit_bytes:
                watch.has_killed = True
                kill()
                return
            pause_s = max(_PAUSE_S, (time.monotonic() - begin_s) / _MAX_SHARE)

    thread = threading.Thread(target=observe, name="memory of a program", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        end.set()
        thread.join()


def program_bytes(pid: int, own_levels: int, enough: int) -> int:
    """Memory of a program in bytes. ``pid``, ``own_levels``: see `watched_memory`.

    Shared pages are counted once; pages in swap are included. If a quick upper bound is at most
    ``enough``, that bound is returned.
    """
    processes = _program_processes(pid, own_levels)
    sockets = _SOCKET_BYTES * _count_sockets(processes)
    upper_bound = sockets + sum(map(_resident_bytes, processes))
    if upper_bound <= enough:
        return upper_bound
    return sockets + sum(map(_proportional_bytes, processes))


def _program_processes(pid: int, own_levels: int) -> list[Path]:
    """Folders in /proc of the program's processes. Orphans are included: they are children of the
    jail's init."""
    program, generation, level = list[Path](), [pid], 0
    while generation:
        if level >= own_levels:
            program += [Path(f"/proc/{number}") for number in generation]
        children = list[int]()
        for parent in generation:
            children += _children(parent)
        generation, level = children, level + 1
    return program


def _children(pid: int) -> list[int]:
    children = list[int]()
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            text = (thread / "children").read_text()
            children += map(int, text.split())
    return children


def _resident_bytes(process: Path) -> int:
    try:
        return int((process / "statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # it has ended
        return 0


def _proportional_bytes(process: Path) -> int:
    """Memory of a process, with its proportional share of pages that several processes use."""
    try:
        sizes = re.findall(
            r"^(?:Pss|SwapPss): *(\d+) kB", (process / "smaps_rollup").read_text(), re.M
        )
        return sum(map(int, sizes)) << 10
    except OSError:
        # The process has ended, or Linux is older than 4.14 or denies access.
        return _resident_bytes(process)


def _count_sockets(processes: list[Path]) -> int:
    """Number of sockets of the program; 0 if it has so few open files that sockets have no
    effect."""
    files = list[Path]()
    for process in processes:
        with contextlib.suppress(OSError):
            files += (process / "fd").iterdir()
    if len(files) <= _UNCOUNTED_FILES:
        return 0
    names = set[str]()
    for file in files:
        with contextlib.suppress(OSError):
            names.add(str(file.readlink()))
    return sum(name.startswith("socket:") for name in names)
