"""A directory in the making: files that are finished are kept over an interruption, and it appears
by rename."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.rundir import sync_directory, write_json
from relax_hpc.training.checkpoint.store import checksum

T = TypeVar("T")


class HashedFile:
    """A file that is only appended to, and the XXH3 checksum (128 bits) of what went in."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sum, self.size = file, xxhash.xxh3_128(), 0
        self.failure: OSError | None = None
        """Error of a write, which torch turns into one of its own."""

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.failure = error
            raise
        self._sum.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self.size

    def flush(self) -> None:
        """Nothing to do: at the end all of it is synced."""

    @property
    def checksum(self) -> str:
        """Hexadecimal checksum of what was written."""
        return self._sum.hexdigest()


class Workspace:
    """Folder that will be ``target``. Its name contains a digest of ``plan`` (JSON values): another
    plan starts afresh, and two processes that carry out the same one write the same bytes.

    ConfigError: ``target`` is there already.
    """

    def __init__(self, target: Path, plan: Any) -> None:
        check_free(target)
        digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:12]
        self.target = target
        self.path = target.with_name(f".{target.name}.converting-{digest}")
        self.kept = 0
        """Files that an earlier attempt had finished."""
        self._records = self.path.with_name(f"{self.path.name}.records")
        with _writing(self.path):
            for folder in (self.path, self._records):
                # By the user's own umask, as what lies in it is.
                folder.mkdir(parents=True, exist_ok=True)

    def file(self, name: str, write: Callable[[HashedFile], Any]) -> dict[str, Any]:
        """The file ``name``, written unless an earlier attempt finished it: its {"checksum",
        "bytes", "about"}.

        ``about`` is what ``write`` returned (JSON values).
        """
        record = self._records / f"{name}.json"
        if (found := self._finished(name, record)) is not None:
            self.kept += 1
            return found
        temporary = self.path / f".{name}.{os.getpid()}"
        with _writing(self.path / name, temporary):
            about = self._write(temporary, write)
            temporary.rename(self.path / name)
            sync_directory(self.path)
            write_json(record, about, sync=True)
        return about

    def _write(self, temporary: Path, write: Callable[[HashedFile], Any]) -> dict[str, Any]:
        with temporary.open("wb") as raw:
            file = HashedFile(raw)
            try:
                about = write(file)
            except RuntimeError:
                if file.failure is not None:
                    raise file.failure from None
                raise
            raw.flush()
            os.fsync(raw.fileno())
        return {"checksum": file.checksum, "bytes": file.size, "about": about}

    def _finished(self, name: str, record: Path) -> dict[str, Any] | None:
        """Record of a file, if the file is as the record says."""
        try:
            found = json.loads(record.read_bytes())
            return found if checksum(self.path / name) == found["checksum"] else None
        except (OSError, ValueError, KeyError):
            return None

    def finish(self, last: Callable[[Path], None], check: Callable[[Path], None]) -> None:
        """Make it ``target``: ``last`` writes the files that make it count, and may do so again;
        then ``check`` looks.

        Nothing is kept of what does not pass (ConfigError).
        """
        with _writing(self.target):
            for path in self.path.glob(".*.[0-9]*"):
                path.unlink()
            last(self.path)
        try:
            check(self.path)
        except ConfigError:
            self._remove()
            raise
        with _writing(self.target):
            for path in (*self.path.rglob("*"), self.path):
                sync_directory(path)
            self.path.rename(self.target)
            sync_directory(self.target.parent)
        self._remove()

    def _remove(self) -> None:
        for other in self.target.parent.glob(f".{self.target.name}.converting-*"):
            shutil.rmtree(other, ignore_errors=True)


def in_files(items: Iterable[tuple[T, int]], limit: int) -> list[list[T]]:
    """Items that go into a file together, of (item, bytes) in order: up to ``limit`` bytes, or one
    item that is larger.

    >>> in_files([("a", 3), ("b", 3), ("c", 9), ("d", 1)], 6)
    [['a', 'b'], ['c'], ['d']]
    """
    files: list[list[T]] = []
    room = 0
    for item, size in items:
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(item)
        room -= size
    return files


def check_free(target: Path) -> None:
    """Raise ConfigError if something has this name."""
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"{target}: is there already, and is never overwritten; name another target"
        )


@contextmanager
def _writing(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """A file system that takes no more ends in one line; what is finished stays for the next
    attempt."""
    try:
        yield
    except OSError as error:
        raise RelaxError(
            f"{path}: cannot be written: {error.strerror or error}; what is finished is kept, run "
            "the same again"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
