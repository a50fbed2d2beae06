"""Output folder of a conversion. Finished files survive an interruption; a rename completes it."""

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
    """A file that is written from start to end, with the XXH3 checksum (128 bits) of its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sum, self.size = file, xxhash.xxh3_128(), 0
        self.failure: OSError | None = None
        """Error of a write, kept because torch replaces it by an error of another type."""

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
        """Does nothing: `Workspace` syncs the complete file."""

    @property
    def checksum(self) -> str:
        """Hexadecimal checksum of the written bytes."""
        return self._sum.hexdigest()


class Workspace:
    """Folder that becomes ``target`` by a rename when it is complete.

    Its name contains a digest of ``plan`` (JSON values), so that another plan starts in a new
    folder. Two processes with the same plan write the same bytes. ConfigError: ``target`` exists.
    """

    def __init__(self, target: Path, plan: Any) -> None:
        check_free(target)
        digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:12]
        self.target = target
        self.path = target.with_name(f".{target.name}.converting-{digest}")
        self.kept_files = 0
        """Number of files that an earlier attempt had finished."""
        self._records = self.path.with_name(f"{self.path.name}.records")
        with _write_errors(self.path):
            for folder in (self.path, self._records):
                # The user's umask decides the permissions, as for the files in it.
                folder.mkdir(parents=True, exist_ok=True)

    def file(self, name: str, write: Callable[[HashedFile], Any]) -> dict[str, Any]:
        """Write the file ``name`` unless an earlier attempt has finished it.

        Returns its record {"checksum", "bytes", "about"}. ``about`` is the result of ``write``
        (JSON values).
        """
        record_path = self._records / f"{name}.json"
        finished = self._finished(name, record_path)
        if finished is not None:
            self.kept_files += 1
            return finished
        temporary = self.path / f".{name}.{os.getpid()}"
        with _write_errors(self.path / name, temporary):
            record = self._write(temporary, write)
            temporary.rename(self.path / name)
            sync_directory(self.path)
            write_json(record_path, record, sync=True)
        return record

    def _write(self, temporary: Path, write: Callable[[HashedFile], Any]) -> dict[str, Any]:
        with temporary.open("wb") as raw:
            file = HashedFile(raw)
            try:
                result = write(file)
            except RuntimeError:
                if file.failure is not None:
                    raise file.failure from None
                raise
            raw.flush()
            os.fsync(raw.fileno())
        return {"checksum": file.checksum, "bytes": file.size, "about": result}

    def _finished(self, name: str, record_path: Path) -> dict[str, Any] | None:
        """Record of a finished file; None if it is missing or its checksum differs."""
        try:
            record = json.loads(record_path.read_bytes())
            return record if checksum(self.path / name) == record["checksum"] else None
        except (OSError, ValueError, KeyError):
            return None

    def finish(
        self, write_description: Callable[[Path], None], check: Callable[[Path], None]
    ) -> None:
        """Rename the folder to ``target``.

        ``write_description`` writes the remaining files; it may run again after an interruption.
        Then ``check`` reads the result. If it raises ConfigError, everything is removed.
        """
        with _write_errors(self.target):
            for path in self.path.glob(".*.[0-9]*"):
                path.unlink()
            write_description(self.path)
        try:
            check(self.path)
        except ConfigError:
            self._remove()
            raise
        with _write_errors(self.target):
            for path in (*self.path.rglob("*"), self.path):
                sync_directory(path)
            self.path.rename(self.target)
            sync_directory(self.target.parent)
        self._remove()

    def _remove(self) -> None:
        """Remove the folders of this target, also those of other plans."""
        for folder in self.target.parent.glob(f".{self.target.name}.converting-*"):
            shutil.rmtree(folder, ignore_errors=True)


def group_into_files(items: Iterable[tuple[T, int]], limit: int) -> list[list[T]]:
    """Group (item, bytes) in their order into files of up to ``limit`` bytes.

    A larger item gets a separate file.

    >>> group_into_files([("a", 3), ("b", 3), ("c", 9), ("d", 1)], 6)
    [['a', 'b'], ['c'], ['d']]
    """
    files: list[list[T]] = []
    free_bytes = 0
    for item, size in items:
        if not files or size > free_bytes:
            files.append([])
            free_bytes = limit
        files[-1].append(item)
        free_bytes -= size
    return files


def check_free(target: Path) -> None:
    """Raise ConfigError if ``target`` exists."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target}: exists, and is never overwritten; name another target")


@contextmanager
def _write_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn errors of the filesystem into RelaxError, and remove ``temporary`` at the end."""
    try:
        yield
    except OSError as error:
        raise RelaxError(
            f"{path}: cannot be written: {error.strerror or error}; finished files are kept, run "
            "the same command again"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
