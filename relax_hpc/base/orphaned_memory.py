"""Shared memory of libraries whose processes were killed before they removed it.

MPICH 4.3 and SGLang 0.5 create files in /dev/shm that they remove only when they end cleanly. Each
kill during a start leaves some files, so that a crash loop fills the memory of the node. A server
that is killed while it passes media between its processes leaves those too.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

from relax_hpc.base.processes import all_processes

MEMORY = Path("/dev/shm")
_NAMES = ("mpich_shm_", "sglang_loads_")
"""Prefixes of the names. Their owners keep each file open or mapped for as long as they need it."""
_NAMES_WITH_PID = re.compile(r"(?:sgl_shm_\w+_(\d+)_[0-9a-f]{8}|multi_tokenizer_args_(\d+))")
"""Names of SGLang 0.5.21 with the pid of the creator of the file. Between the write of one process
and the read of another, no process has it open or mapped."""


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
            is_candidate = path.name.startswith(_NAMES) or _creator_has_ended(path.name)
            if is_candidate and path.lstat().st_uid == os.getuid():
                files.add(path)
    return files


def _creator_has_ended(name: str) -> bool:
    """Whether ``name`` has the pid of a process, and that process has ended."""
    match = _NAMES_WITH_PID.fullmatch(name)
    return match is not None and not psutil.pid_exists(int(match[1] or match[2]))


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
