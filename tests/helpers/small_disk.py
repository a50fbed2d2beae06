"""A file system of a few MiB that a test can fill, or make read-only: a real tmpfs in a mount
namespace."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_MOUNT = """
mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted
while read -r how; do mount -o remount,bind,"$how" "$2" && echo "$how" || echo failed; done
"""


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """`fill` takes all its room, but for what is asked to be left; `free` gives it back."""

    folder: Path
    holder: subprocess.Popen
    """The process that has mounted it."""

    @property
    def _filling(self) -> Path:
        return self.folder / ".filling"

    def fill(self, left: int = 0) -> None:
        """Until so many bytes, in whole pages, are free."""
        with self._filling.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while (free := self.left() - left) > 0:
                file.write(bytes(min(free, 1 << 20)))

    def left(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def free(self) -> None:
        self._filling.unlink(missing_ok=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """For the body. No file may be open for writing when it begins."""
        self._remount("ro")
        yield
        self._remount("rw")

    def _remount(self, how: str) -> None:
        self.holder.stdin.write(f"{how}\n".encode())
        self.holder.stdin.flush()
        assert self.holder.stdout.readline().decode().strip() == how, (
            self.holder.stderr.read1().decode()
        )


@contextmanager
def small_disk(folder: Path, size: str = "8m") -> Iterator[SmallDisk]:
    """A disk mounted on ``folder`` in a mount namespace, which ends with the process that holds
    it."""
    folder.mkdir()
    words = ["sh", "-c", _MOUNT, "sh", size, str(folder)]
    rights = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    words = ["unshare", *rights, "--mount", *words]
    holder = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        if holder.stdout.readline() != b"mounted\n":
            pytest.skip(f"no tmpfs can be mounted here: {holder.stderr.read().decode().strip()}")
        # Only in the namespace of its holder is it on ``folder``.
        yield SmallDisk(Path(f"/proc/{holder.pid}/root{folder}"), holder)
    finally:
        holder.communicate(timeout=10)
