"""Shared memory of libraries whose processes were killed before they removed it.

MPICH 4.3 and SGLang 0.5 create files in /dev/shm that they remove only when they end cleanly. Each
kill during a start leaves some files, so that a crash loop fills the memory of the node.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from relax_hpc.base.processes import all_processes

MEMORY = Path("/dev/shm")
_NAMES = ("mpich_shm_", "sglang_loads_")
"""Prefixes of the names. Their owners keep each file open or mapped for as long as they need it."""


def sweep_orphaned_memory() -> None:
    """Remove the files of this user that no process has open or mapped."""
    orphans = _own_files()
    if not orphans:
        # The check of all processes takes milliseconds, so it is skipped if it is not needed.
        return
    for process in all_processes():
        orphans -= _used_files(process.pid)
    for path in orphans:
        with contextlib.suppress(OSError):
            path.unlink()


def _own_files() -> set[Path]:
    files: set[Path] = set()
    with contextlib.suppress(OSError):
        for path in MEMORY.iterdir():
            if path.name.startswith(_NAMES) and path.lstat().st_uid == os.getuid():
                files.add(path)
    return files


def _used_files(pid: int) -> set[Path]:
    """Files in `MEMORY` that a process has open or mapped. Empty: it is another user's process."""
    used: set[Path] = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            columns = line.split(maxsplit=5)
            if len(columns) == 6 and columns[5].startswith(f"{MEMORY}/"):
                used.add(Path(columns[5]))
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                used.add(link.readlink())
    return used
