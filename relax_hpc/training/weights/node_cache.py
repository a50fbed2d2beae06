"""Verified weights in the memory of a node. One process pulls a version; all processes that need it
use the same copy.

Each version has a folder in one folder of the run, and a lock file next to it. A process that uses
a version holds its lock shared. A process that creates or removes it holds the lock exclusively.
The kernel releases the locks of a process that has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.rundir import RunDir, private_folder

_LOCK = ".lock"
_SPARE = ".spare"
# Seconds between checks for a folder that another process creates, first and later. Small models
# are complete within a millisecond.
_FIRST_POLL_S, _POLL_S = 0.0005, 0.02


def staging_root(run: RunDir) -> Path:
    """Memory-backed folder of this run on this node. The supervisor removes it when the run
    ends."""
    name = f"relax-{os.getuid()}-{hashlib.sha256(str(run.root).encode()).hexdigest()[:16]}"
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        memory = Path(tempfile.gettempdir())
    return memory / name


def clear_staging(run: RunDir) -> None:
    """Remove folders that no process of this node uses."""
    root = staging_root(run)
    with contextlib.suppress(OSError):
        if root.is_dir():
            Staging(root).clear(lambda name: True)
            (root / _SPARE).unlink(missing_ok=True)
            root.rmdir()


@dataclass(slots=True)
class StagedFolder:
    """Folder that does not change before `release`."""

    path: Path
    _fd: int

    def duplicate(self) -> StagedFolder:
        """The same folder for another holder. It does not change before both have released it."""
        return StagedFolder(self.path, os.dup(self._fd))

    def release(self) -> None:
        """Release the lock. After it, the files may not be read, mapped or not. A second call does
        nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _downgrade(fd: int) -> bool:
    """Convert an exclusive lock to a shared one. False: another process has it.

    flock does not convert atomically: another process may lock exclusively in between, and remove
    the folder.
    """
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


class Staging:
    """Staging folders below ``root``, which only this user may read or write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, name: str, make: Callable[[Path], None], patience_s: float) -> StagedFolder:
        """Folder ``name``. If it does not exist, ``make(folder)`` creates it, while other processes
        wait.

        DeadlineError after ``patience_s`` seconds of waiting for another process. Errors of
        ``make`` are raised.
        """
        deadline, pause = time.monotonic() + patience_s, _FIRST_POLL_S
        while True:
            # In the loop, because another process may remove the root at any time.
            private_folder(self.root)
            if (fd := self._lock(name, fcntl.LOCK_EX)) is not None:
                try:
                    if not (self.root / name).exists():
                        self._make(name, make)
                    shared = _downgrade(fd)
                except BaseException:
                    os.close(fd)
                    raise
                if not shared:
                    os.close(fd)
                    continue
            else:
                fd = self._lock(name, fcntl.LOCK_SH)
            if fd is not None:
                if (self.root / name).exists() and self._is_current(name, fd):
                    return StagedFolder(self.root / name, fd)
                os.close(fd)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.root / name}: no process of this node has created it within "
                    f"{patience_s:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)

    def _make(self, name: str, make: Callable[[Path], None]) -> None:
        partial = self.root / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        try:
            make(partial)
            partial.rename(self.root / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def take_spare(self, target: Path) -> None:
        """Move an unused file to ``target``, if one exists. Its memory is faster than new memory,
        whose pages the kernel must zero."""
        with contextlib.suppress(FileNotFoundError):
            (self.root / _SPARE).rename(target)

    def clear(self, is_obsolete: Callable[[str], bool]) -> None:
        """Remove the unused folders whose names are obsolete. One large file of them is stored for
        `take_spare`."""
        for lock in self.root.glob(f"*{_LOCK}"):
            name = lock.name.removesuffix(_LOCK)
            fd = self._lock(name, fcntl.LOCK_EX) if is_obsolete(name) else None
            if fd is None:
                continue
            try:
                with contextlib.suppress(OSError, ValueError):
                    files = (self.root / name).iterdir()
                    largest = max(files, key=lambda path: path.lstat().st_size)
                    largest.rename(self.root / _SPARE)
                for path in (self.root / name, self.root / f".{name}.partial"):
                    shutil.rmtree(path, ignore_errors=True)
                lock.unlink(missing_ok=True)
            finally:
                os.close(fd)

    def _lock(self, name: str, kind: int) -> int | None:
        """A file descriptor that holds the lock of folder ``name``; None: another process holds
        it."""
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.root / f"{name}{_LOCK}", flags, 0o600)
        except FileNotFoundError:
            # The root has just been removed.
            return None
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if self._is_current(name, fd):
            return fd
        os.close(fd)
        return None

    def _is_current(self, name: str, fd: int) -> bool:
        """Whether the locked file is still the folder's lock. `clear` removes the lock file."""
        with contextlib.suppress(FileNotFoundError):
            return (self.root / f"{name}{_LOCK}").stat().st_ino == os.fstat(fd).st_ino
        return False
