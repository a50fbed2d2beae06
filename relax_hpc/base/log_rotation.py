"""Rotation of files that grow as long as a run lives.

A full file is moved to a numbered, compressed file next to it: `actor-rank-0.log` has the newest
lines, `actor-rank-0.log.000007.gz` the lines before, and so on. The oldest rotated files of a log
are deleted. `read_all_lines` reads the lines of all files in order.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from relax_hpc.base import foreign_files
from relax_hpc.base.foreign_files import open_in_run, read_in_run, unpack_gzip

ROTATION_BYTES = 32 << 20
"""Bytes above which a file is rotated."""
MAX_FILE_BYTES = 8 * ROTATION_BYTES
"""Uncompressed bytes of a file that are read, at most. A file can grow beyond `ROTATION_BYTES`
until its next check."""
KEPT_FILES = 8
"""Rotated files of a log that are kept. Compressed, text of logs has a tenth of its size."""
_LEVEL = 3
"""Level of compression. Higher levels take twice the time and save a tenth of the size."""
_BLOCK_BYTES = 1 << 20
_CHECK_S = 10.0
_COMPRESSING = threading.Lock()
_ROTATED = re.compile(r"\.(\d{6})(\.gz)?")


def rotated_files(path: Path) -> list[Path]:
    """Rotated files of ``path``, oldest first; each number once, even while it is compressed."""
    files: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for other in path.parent.iterdir():
            if not other.name.startswith(path.name):
                continue
            match = _ROTATED.fullmatch(other.name.removeprefix(path.name))
            # The compressed file appears, complete, before the other one is removed.
            if match and (match[2] or int(match[1]) not in files):
                files[int(match[1])] = other
    return [files[number] for number in sorted(files)]


def rotation_number(rotated: Path) -> int:
    """Number of a rotated file.

    >>> rotation_number(Path("actor.log.000007.gz"))
    7
    """
    return int(rotated.name.removesuffix(".gz")[-6:])


def next_rotated_file(path: Path) -> Path:
    """Name of the next rotated file of ``path``, not compressed."""
    last = max(map(rotation_number, rotated_files(path)), default=0)
    return path.with_name(f"{path.name}.{last + 1:06d}")


def read_rotated_file(rotated: Path, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Content of a rotated file.

    ForeignFileError: it is no file of a run, or has more than ``most_bytes``.
    """
    data = read_in_run(rotated, most_bytes)
    return unpack_gzip(data, rotated, most_bytes) if rotated.suffix == ".gz" else data


def read_all_lines(path: Path) -> Iterator[bytes]:
    """All lines of ``path`` and its rotated files, with their line ends.

    Files that are no files of a run are left out, and so is the content of each file after
    `MAX_FILE_BYTES`, or after the first damage.
    """
    for rotated in rotated_files(path):
        yield from read_rotated_lines(rotated)
    with contextlib.suppress(FileNotFoundError), open_in_run(path) as file:
        yield from _bounded_lines(file)


def read_rotated_lines(rotated: Path) -> Iterator[bytes]:
    """Lines of one rotated file, see `read_all_lines`."""
    with contextlib.suppress(OSError, EOFError, zlib.error), open_in_run(rotated) as file:
        if rotated.suffix == ".gz":
            with gzip.GzipFile(fileobj=file) as content:
                yield from _bounded_lines(cast(BinaryIO, content))
        else:
            yield from _bounded_lines(file)


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    size = 0
    for line in foreign_files.read_lines(file):
        size += len(line)
        if size > MAX_FILE_BYTES:
            return
        yield line


def compress_rotated_file(rotated: Path) -> Path:
    """Replace a rotated file by a compressed one, which appears complete. Returns its path."""
    with rotated.open("rb") as source:
        target = _compress(source, rotated)
    rotated.unlink(missing_ok=True)
    return target


def rotate_log(path: Path, max_bytes: int = 0, kept: int = 0) -> bool:
    """Move the content of a log to a new rotated file if it has more than ``max_bytes``.

    Only the newest ``kept`` rotated files stay. Processes that have the log open continue at its
    beginning, because it is opened to append; bytes that they write within the microseconds
    before `truncate` are lost. Returns whether the log was rotated. OSError: nothing has changed.
    """
    try:
        file = path.open("rb+")
    except FileNotFoundError:
        return False
    with file:
        if os.fstat(file.fileno()).st_size <= (max_bytes or ROTATION_BYTES):
            return False
        _compress(file, next_rotated_file(path))
        new_bytes = file.read()
        file.truncate(0)
        if new_bytes:
            with path.open("ab") as log:
                log.write(new_bytes)
    for old in rotated_files(path)[: -(kept or KEPT_FILES)]:
        old.unlink(missing_ok=True)
    return True


def rotate_closed_file(path: Path, kept: int) -> None:
    """Rotate a file that only this process writes, and has closed. A thread compresses it.

    Nothing of it is lost. If the file cannot be moved, it continues to grow.
    """
    with contextlib.suppress(OSError):
        path.replace(next_rotated_file(path))
        threading.Thread(
            target=_compress_all, args=(path, kept), name="compression", daemon=True
        ).start()


def _compress_all(path: Path, kept: int) -> None:
    # One thread at a time: if another one removes a file after its compression, this one would
    # fail with FileNotFoundError and leave the other files.
    with _COMPRESSING, contextlib.suppress(OSError):
        for rotated in rotated_files(path):
            if rotated.suffix != ".gz":
                compress_rotated_file(rotated)
        for old in rotated_files(path)[:-kept]:
            old.unlink(missing_ok=True)


def _compress(source: BinaryIO, rotated: Path) -> Path:
    target = rotated.with_name(f"{rotated.name}.gz")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("wb") as file, gzip.GzipFile("", "wb", _LEVEL, file, 0) as packed:
            shutil.copyfileobj(source, packed, _BLOCK_BYTES)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


class LogRotator:
    """Rotates logs in a thread.

    It runs on the node whose processes write the logs. On a shared file system, other nodes would
    see their sizes too late.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._paths = set(paths)
        self._end = threading.Event()
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def add(self, path: Path) -> None:
        """Also rotate the log at ``path``."""
        self._paths = {*self._paths, path}

    def close(self) -> None:
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(_CHECK_S):
            for path in self._paths:
                # On a full disk the log stays unchanged, and the next round tries it again.
                with contextlib.suppress(OSError):
                    rotate_log(path)


def find_own_log() -> list[Path]:
    """List with the log to which this process prints; empty: it prints to something else."""
    with contextlib.suppress(OSError):
        path = Path("/proc/self/fd/1").readlink()
        if path.suffix == ".log" and path.is_file():
            return [path]
    return []
