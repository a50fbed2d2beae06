"""Files that grow as long as a run lives, kept short: what is full becomes a numbered part,
compressed, beside them.

`actor-rank-0.log` has the newest lines, `actor-rank-0.log.000007.gz` those before, and so on; of
logs the oldest parts are deleted. `read_all_lines` reads all that there is, in order.
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
from typing import BinaryIO

from relax_hpc.base import foreign_files
from relax_hpc.base.foreign_files import open_in_run, read_in_run, unpack_gzip

ROTATION_BYTES = 32 << 20
"""Bytes beyond which a file is cut."""
MAX_FILE_BYTES = 8 * ROTATION_BYTES
"""Bytes of a part at most, not compressed: a file goes on growing until it is looked at."""
KEPT_FILES = 8
"""Parts of a log that are kept. Text of logs shrinks to a tenth."""
_LEVEL = 3
"""Level of compression: the next ones take twice the time for a tenth less."""
_BLOCK = 1 << 20
_LOOK_S = 10.0
_PACKING = threading.Lock()
_PART = re.compile(r"\.(\d{6})(\.gz)?")


def rotated_files(path: Path) -> list[Path]:
    """Parts cut off from the beginning of ``path``, oldest first; each once, though it is just
    being compressed."""
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for other in path.parent.iterdir():
            match = (
                _PART.fullmatch(other.name.removeprefix(path.name))
                if other.name.startswith(path.name)
                else None
            )
            # The whole one appears by rename, before the other goes.
            if match and (match[2] or int(match[1]) not in found):
                found[int(match[1])] = other
    return [found[number] for number in sorted(found)]


def rotation_number(part: Path) -> int:
    """
    >>> rotation_number(Path("actor.log.000007.gz"))
    7
    """
    return int(part.name.removesuffix(".gz")[-6:])


def next_rotated_file(path: Path) -> Path:
    """The name of the part that is to be cut off next, not compressed."""
    last = max(map(rotation_number, rotated_files(path)), default=0)
    return path.with_name(f"{path.name}.{last + 1:06d}")


def read_rotated_file(part: Path, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Content of a part. ForeignFileError: it is no file of a run, or has more than
    ``most_bytes``."""
    data = read_in_run(part, most_bytes)
    return unpack_gzip(data, part, most_bytes) if part.suffix == ".gz" else data


def read_all_lines(path: Path) -> Iterator[bytes]:
    """All lines of ``path`` and its parts, with their ends; of a part that is damaged, those before
    the damage.

    What is no file of a run is left out, and of each file what comes after `MAX_FILE_BYTES`.
    """
    for part in rotated_files(path):
        yield from read_rotated_lines(part)
    with contextlib.suppress(FileNotFoundError), open_in_run(path) as file:
        yield from _bounded_lines(file)


def read_rotated_lines(part: Path) -> Iterator[bytes]:
    """Lines of one part, as of `read_all_lines`."""
    with contextlib.suppress(OSError, EOFError, zlib.error), open_in_run(part) as file:
        with gzip.GzipFile(fileobj=file) if part.suffix == ".gz" else file as content:
            yield from _bounded_lines(content)


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    size = 0
    for line in foreign_files.read_lines(file):
        size += len(line)
        if size > MAX_FILE_BYTES:
            return
        yield line


def compress_rotated_file(part: Path) -> Path:
    """``part`` as a compressed file, which is there whole or not at all; its path. The other is
    gone."""
    with part.open("rb") as source:
        target = _pack(source, part)
    part.unlink(missing_ok=True)
    return target


def rotate_log(path: Path, most: int = 0, kept: int = 0) -> bool:
    """Move what is in a log to a new part if it has over ``most`` bytes, and delete all but the
    newest ``kept`` parts.

    Whoever writes to it, libraries and processes that inherited it too, goes on at its new
    beginning, as it was opened to append; only what is written in the very microseconds of the cut
    is lost. OSError: nothing has changed.
    """
    try:
        file = path.open("rb+")
    except FileNotFoundError:
        return False
    with file:
        if os.fstat(file.fileno()).st_size <= (most or ROTATION_BYTES):
            return False
        _pack(file, next_rotated_file(path))
        rest = file.read()
        file.truncate(0)
        if rest:
            with path.open("ab") as begun:
                begun.write(rest)
    for old in rotated_files(path)[: -(kept or KEPT_FILES)]:
        old.unlink(missing_ok=True)
    return True


def rotate_closed_file(path: Path, kept: int) -> None:
    """Make a file that this process alone writes, and has closed, the next part; it is compressed
    in a thread.

    Nothing of it is lost. Where it cannot be done, the file goes on growing.
    """
    with contextlib.suppress(OSError):
        path.replace(next_rotated_file(path))
        threading.Thread(target=_pack_parts, args=(path, kept), name="parts", daemon=True).start()


def _pack_parts(path: Path, kept: int) -> None:
    # One thread at a time: of two, one would find a part gone that the other has just compressed,
    # and leave the rest.
    with _PACKING, contextlib.suppress(OSError):
        for part in rotated_files(path):
            if part.suffix != ".gz":
                compress_rotated_file(part)
        for old in rotated_files(path)[:-kept]:
            old.unlink(missing_ok=True)


def _pack(source: BinaryIO, part: Path) -> Path:
    target = part.with_name(f"{part.name}.gz")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("wb") as file, gzip.GzipFile("", "wb", _LEVEL, file, 0) as packed:
            shutil.copyfileobj(source, packed, _BLOCK)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


class LogRotator:
    """Cuts logs in a thread of its own, on the node whose processes write them: others would see it
    too late."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._paths = set(paths)
        self._end = threading.Event()
        threading.Thread(target=self._look, name="logs", daemon=True).start()

    def add(self, path: Path) -> None:
        """Look after the log at ``path`` too."""
        self._paths = {*self._paths, path}

    def close(self) -> None:
        self._end.set()

    def _look(self) -> None:
        while not self._end.wait(_LOOK_S):
            for path in self._paths:
                # A full disk: it is tried again, and the log is as it was.
                with contextlib.suppress(OSError):
                    rotate_log(path)


def find_own_log() -> list[Path]:
    """List with the log that this process prints to; empty if it is none."""
    with contextlib.suppress(OSError):
        path = Path("/proc/self/fd/1").readlink()
        if path.suffix == ".log" and path.is_file():
            return [path]
    return []
