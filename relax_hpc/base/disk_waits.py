"""A disk that is full, over quota, read-only or ill is a wait: who writes tries again, says so, and
nothing is lost.

`retry_write` tries a write again until it succeeds. `WriteRetry` is the same for a loop that has
other work meanwhile. What is there to be looked at alone goes to a `AppendFile`, or through
`ignore_print_errors`: its writers never wait and never fail. What this process waits for is in
`WAITS`, which its beats tell the hub, and so everybody.
"""

from __future__ import annotations

import errno
import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from relax_hpc.base.terminal_text import HarmlessStream, unfiltered

T = TypeVar("T")
CURES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EROFS: "have it mounted for writing again",
    errno.EIO: "see whether its file system is well",
}
"""Cures of the errors that may be over in a while. On shared file systems EIO is one: a server was
away."""
_SOONEST_S, _LATEST_S = 0.1, 2.0
"""Seconds between two tries."""
_LOOSE_S = 10.0
"""Seconds for which a write that nobody waits for counts as hindered after its last try."""
_GRACE_S = 60.0
"""Seconds by which a process that nobody ends waits longer than the run, which its supervisor ends
before."""
_KEPT_BYTES = 16 << 20
_PROBE_BYTES = 1 << 20
DiskWait = dict[str, Any]
"""A wait as beats and `status` have it: {path, errno, seconds, loose}."""


def is_temporary(error: BaseException) -> bool:
    """Whether ``error`` says that a disk cannot be written now, and may be later."""
    return isinstance(error, OSError) and error.errno in CURES


def describe_write_error(path: Path | str, error: OSError) -> str:
    """Message with what cannot be written, why, and what to do."""
    return f"{path}: {os.strerror(error.errno)}; {CURES.get(error.errno, 'see its file system')}"


def describe_wait(wait: Mapping[str, Any]) -> str:
    """The same, of a wait.

    >>> describe_wait({"path": "/r/queue", "errno": errno.ENOSPC})
    '/r/queue: No space left on device; free space there, the run goes on by itself'
    """
    error = OSError(wait["errno"], "")
    return f"{describe_write_error(wait['path'], error)}, the run goes on by itself"


@dataclass(slots=True)
class _Wait:
    errno: int
    loose: bool
    since: float = field(default_factory=time.monotonic)
    failed_at: float = 0.0

    def counts(self) -> bool:
        """Whether the disk may still be full. The owner of a loose wait may have nothing to write
        for a long time, and so does not notice that there is room again."""
        return not self.loose or time.monotonic() - self.failed_at < _LOOSE_S


class DiskWaits:
    """The writes of this process that do not succeed, by path; safe to use from threads."""

    def __init__(self) -> None:
        self.limit_s = math.inf
        """Seconds for which a write is tried again."""
        self._lock = threading.Lock()
        self._waits: dict[str, _Wait] = {}

    def begin(self, path: Path | str, error: OSError, loose: bool = False) -> float:
        """``path`` could not be written, perhaps again; since how many seconds. ``loose``: nobody
        waits for that."""
        with self._lock:
            wait = self._waits.setdefault(str(path), _Wait(error.errno, loose))
            wait.errno, wait.loose, wait.failed_at = error.errno, loose, time.monotonic()
            return wait.failed_at - wait.since

    def end(self, path: Path | str) -> None:
        """End the wait for ``path``: it was written, or nobody tries any more."""
        if self._waits:
            with self._lock:
                self._waits.pop(str(path), None)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._waits)

    def longest(self) -> DiskWait:
        """The one that goes on longest, those that somebody waits for first; empty: all is well."""
        if not self._waits:
            return {}
        with self._lock:
            waits = [item for item in self._waits.items() if item[1].counts()]
        if not waits:
            return {}
        path, wait = min(waits, key=lambda item: (item[1].loose, item[1].since))
        seconds = time.monotonic() - wait.since
        return {"path": path[:1024], "errno": wait.errno, "seconds": seconds, "loose": wait.loose}


WAITS = DiskWaits()
"""Waits of this process."""


def retry_write(path: Path, write: Callable[[], T], until: Callable[[], bool] = lambda: False) -> T:
    """Result of ``write``, which writes something whole at ``path``, or undoes what it has begun
    and raises.

    It is tried again as long as its error `is_temporary`, at most `Waits.limit_s`, and not once
    ``until()``.
    """
    for pause in _pauses():
        try:
            done = write()
        except OSError as error:
            if (
                not is_temporary(error)
                or until()
                or WAITS.begin(path, error) > WAITS.limit_s + _GRACE_S
            ):
                WAITS.end(path)
                raise
            time.sleep(pause)
        except BaseException:
            WAITS.end(path)
            raise
        else:
            WAITS.end(path)
            return done
    raise AssertionError("unreachable")


def has_passed_in(seconds: float) -> Callable[[], bool]:
    """Function that says whether ``seconds`` have passed since now."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _pauses() -> Iterator[float]:
    pause = _SOONEST_S
    while True:
        yield pause
        pause = min(2 * pause, _LATEST_S)


class WriteRetry:
    """One write that a loop tries again between other work: `due` says when.

    >>> patience = WriteRetry(Path("/r/journal"))
    >>> patience.note_failure(OSError(errno.ENOSPC, "full"))
    >>> bool(patience), patience.is_due()
    (True, False)
    >>> patience.note_success()
    >>> bool(patience), patience.is_due()
    (False, True)
    """

    def __init__(self, path: Path, loose: bool = False) -> None:
        self.path, self.loose = path, loose
        self._pauses: Iterator[float] | None = None
        self.next_try = 0.0
        """Time of the next try, on the monotonic clock."""

    def __bool__(self) -> bool:
        """Whether the last try has failed."""
        return self._pauses is not None

    def is_due(self) -> bool:
        return time.monotonic() >= self.next_try

    def note_failure(self, error: OSError) -> None:
        """Note that a write failed. Raises ``error`` unless it `is_temporary`."""
        if not is_temporary(error):
            raise error
        WAITS.begin(self.path, error, self.loose)
        self._pauses = self._pauses or _pauses()
        self.next_try = time.monotonic() + next(self._pauses)

    def note_success(self) -> None:
        if self._pauses:
            self._pauses, self.next_try = None, 0.0
            WAITS.end(self.path)


class AppendFile:
    """A file to be looked at, which grows by whole pieces. What its disk does not take is kept and
    written later; what is too much to keep is dropped. No write of it waits or fails."""

    def __init__(self, path: Path) -> None:
        """Append to ``path``, from a line of its own on."""
        self.path = path
        self.dropped = 0
        """Bytes that were left out."""
        self._patience = WriteRetry(path, loose=True)
        self.closed = False
        self._file: int | None = None
        self._rest = bytearray()
        self.flush()

    def write(self, data: bytes) -> None:
        """Add ``data``: it is in the file after the next `flush` that succeeds, unless it comes
        after `close`."""
        if self.closed:
            return
        if len(self._rest) + len(data) <= _KEPT_BYTES:
            self._rest += data
        else:
            self.dropped += len(data)

    def flush(self) -> None:
        """Write what there is, if the disk takes it."""
        if (self._file is None or self._rest) and self._patience.is_due():
            try:
                self._write()
                self._patience.note_success()
            except OSError as error:
                self._patience.note_failure(error)

    @property
    def is_written(self) -> bool:
        """Whether the file has all that was written."""
        return self._file is not None and not self._rest

    def write_all(self) -> None:
        """`retry_write` write what there is."""
        retry_write(self.path, self._write)
        self._patience.note_success()

    def fileno(self) -> int:
        """Descriptor of the file, once something was written."""
        assert self._file is not None
        return self._file

    def _write(self) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            if (size := os.fstat(self._file).st_size) and os.pread(
                self._file, 1, size - 1
            ) != b"\n":
                # As a killed writer leaves it.
                self._rest[:0] = b"\n"
        while self._rest:
            del self._rest[: os.write(self._file, self._rest)]

    def close(self) -> None:
        """Close the file; what cannot be written now never is. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._patience.next_try = 0.0
        self.flush()
        WAITS.end(self.path)
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Printed(io.FileIO):
    """A descriptor that is printed to. A print ends no process: text that cannot be written is
    dropped if the disk is full, the terminal is closed (EIO), or the reader of a pipe has ended
    (EPIPE)."""

    is_cut = False
    """Whether the last line in the file may lack its end."""

    def write(self, data: Any) -> int:
        try:
            if self.is_cut:
                super().write(b"\n")
                self.is_cut = False
            return super().write(data) or 0
        except OSError as error:
            if not is_temporary(error) and error.errno != errno.EPIPE:
                raise
            self.is_cut = True
            return memoryview(data).nbytes


def ignore_print_errors() -> None:
    """Let no print of this process fail from now on: see `_Printed`."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if unfiltered(stream) is not getattr(sys, f"__{name}__"):
            # A test looks at it, or a notebook.
            continue
        stream.flush()
        raw = io.BufferedWriter(_Printed(number, "wb", closefd=False))
        printed = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(
            sys, name, HarmlessStream(printed) if isinstance(stream, HarmlessStream) else printed
        )


def await_disk_space(folder: Path) -> None:
    """Wait `retry_write` until ``folder`` can be written."""
    retry_write(folder / "", lambda: _try(folder))


def _try(folder: Path, size: int = _PROBE_BYTES) -> None:
    path = folder / f".probe-{os.getpid()}"
    try:
        with path.open("wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def probe_folder(folder: Path, size: int = _PROBE_BYTES) -> DiskWait:
    """Whether so many bytes can be written to ``folder``: what hinders that, empty if nothing does;
    they are gone then."""
    try:
        _try(folder, size)
    except OSError as error:
        if not is_temporary(error):
            raise
        return {"path": str(folder), "errno": error.errno, "seconds": 0.0, "loose": False}
    return {}
