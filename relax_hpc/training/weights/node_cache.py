"""Verified weights in the memory of a node: pulled by one process, used by all that need the same
version.

Folders of versions lie in one folder of the run, each with a lock file beside it. Whoever uses a
version holds its lock shared; whoever makes or removes it, alone. The kernel lets go of the locks
of a process that has died.
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
_FIRST_LOOK_S, _LOOK_S = 0.0005, 0.02
"""Seconds between looks at what another process makes, at first and later: small models are there
in a millisecond."""


def staging_root(run: RunDir) -> Path:
    """Memory-backed folder of this run on this node; the supervisor removes it when the run
    ends."""
    name = f"relax-{os.getuid()}-{hashlib.sha256(str(run.root).encode()).hexdigest()[:16]}"
    memory = Path("/dev/shm")
    return (memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())) / name


def clear_staging(run: RunDir) -> None:
    """Remove folders that no living process of this node uses."""
    root = staging_root(run)
    with contextlib.suppress(OSError):
        if root.is_dir():
            Staging(root).clear(lambda name: True)
            (root / _SPARE).unlink(missing_ok=True)
            root.rmdir()


@dataclass(slots=True)
class StagedFolder:
    """Folder that stays as it is until `release`."""

    path: Path
    _fd: int

    def again(self) -> StagedFolder:
        """Folder as another holder's, which stays until both have released it."""
        return StagedFolder(self.path, os.dup(self._fd))

    def release(self) -> None:
        """Nobody may look into the files any more, mapped or not. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _share(fd: int) -> bool:
    """Hold a lock with others that was held alone. Not in one step: somebody may have it alone now,
    and remove what it is of."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


class Staging:
    """Staging folders below ``root``, which is this user's alone."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, name: str, make: Callable[[Path], None], patience_s: float) -> StagedFolder:
        """Folder ``name``, made by ``make(folder)`` unless it is there; others wait while one
        process makes it.

        DeadlineError after ``patience_s`` seconds of waiting for others; and whatever ``make``
        raises.
        """
        deadline, pause = time.monotonic() + patience_s, _FIRST_LOOK_S
        while True:
            private_folder(self.root)
            if (fd := self._lock(name, fcntl.LOCK_EX)) is not None:
                try:
                    if not (self.root / name).exists():
                        self._make(name, make)
                    shared = _share(fd)
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
                    f"{self.root / name}: no process of this node has made it in {patience_s:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S)

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
        """Move memory that nobody uses to ``target``, if there is any: it is quicker than fresh
        one."""
        with contextlib.suppress(FileNotFoundError):
            (self.root / _SPARE).rename(target)

    def clear(self, doomed: Callable[[str], bool]) -> None:
        """Remove the folders that nobody uses and whose names are ``doomed``; one large file of
        them is kept spare."""
        for lock in self.root.glob(f"*{_LOCK}"):
            name = lock.name.removesuffix(_LOCK)
            if doomed(name) and (fd := self._lock(name, fcntl.LOCK_EX)) is not None:
                try:
                    with contextlib.suppress(OSError, ValueError):
                        largest = max(
                            (self.root / name).iterdir(), key=lambda path: path.lstat().st_size
                        )
                        largest.rename(self.root / _SPARE)
                    for path in (self.root / name, self.root / f".{name}.partial"):
                        shutil.rmtree(path, ignore_errors=True)
                    lock.unlink(missing_ok=True)
                finally:
                    os.close(fd)

    def _lock(self, name: str, kind: int) -> int | None:
        """A file descriptor that holds the lock of folder ``name``; None if somebody else's stands
        against it."""
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
        """Whether the file that was locked is still the folder's lock: whoever clears removes
        it."""
        with contextlib.suppress(FileNotFoundError):
            return (self.root / f"{name}{_LOCK}").stat().st_ino == os.fstat(fd).st_ino
        return False
