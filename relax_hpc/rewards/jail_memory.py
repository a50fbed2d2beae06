"""The limit on the memory of all processes of a program together, where no control group can hold
it.

A thread adds up what the processes have and kills the program if that is too much. A program may
exceed the limit for some hundredths of a second; `RLIMIT_AS` bounds each of its processes
meanwhile.
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
"""Share of a processor that the thread may need."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UNCOUNTED_FILES = 256
"""Open files of a program from which on its sockets are counted."""
_SOCKET_BYTES = 425_984
"""Bytes that a socket may hold: twice net.core.wmem_max of Linux, 212,992, which the kernel allows
with its own overhead. No file in /proc says how many they are."""


class MemoryWatch:
    """Watch over a program, made by `watched_memory`."""

    def __init__(self) -> None:
        self.has_killed = False
        """Whether the program needed too much memory."""


@contextlib.contextmanager
def watched_memory(
    pid: int, own_levels: int, limit_bytes: int, kill: Callable[[], None]
) -> Iterator[MemoryWatch]:
    """Call ``kill`` once a program has more than ``limit_bytes``, until the end of the context.

    ``pid``: process from which the program descends; ``own_levels``: generations that are not part
    of the program, that process included.
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
    """Memory of a program in bytes; ``pid`` and ``own_levels`` as of `watched_memory`.

    Pages that processes share count once, and so do those in swap. If a quick upper bound is not
    more than ``enough``, that bound is returned.
    """
    processes = _program(pid, own_levels)
    sockets = _SOCKET_BYTES * _count_sockets(processes)
    upper_bound = sockets + sum(map(_resident_bytes, processes))
    if upper_bound <= enough:
        return upper_bound
    return sockets + sum(map(_proportional_bytes, processes))


def _program(pid: int, own_levels: int) -> list[Path]:
    """Folders in /proc of the program's processes. An orphan is a child of the jail's init."""
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
    """Memory of a process; of pages that several processes share, its part."""
    try:
        sizes = re.findall(
            r"^(?:Pss|SwapPss): *(\d+) kB", (process / "smaps_rollup").read_text(), re.M
        )
        return sum(map(int, sizes)) << 10
    except OSError:
        # It has ended, or Linux is older than 4.14, or denies it.
        return _resident_bytes(process)


def _count_sockets(processes: list[Path]) -> int:
    """Sockets of the program; 0 if it has so few open files that sockets do not matter."""
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
