"""Waits for a disk that is full, over quota, read-only or has I/O errors. Writes are tried again.

`retry_write` tries a write again until it succeeds. `WriteRetry` is the same for a loop that has
other work between the tries. `AppendFile` and `ignore_print_errors` are for text that only people
read: such a write never waits and never fails. `WAITS` has the waits of this process. Its beats
report them to the hub, which shows them in the terminal and in `status`.
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
"""Number of an error that may be temporary -> what the user can do. On shared file systems EIO can
mean that a server was unavailable for a while."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
"""Seconds between two tries, at least and at most."""
_LOOSE_S = 10.0
"""Seconds after its last failed try for which a loose wait counts."""
_GRACE_S = 60.0
"""Seconds by which a process waits longer than the limit of the run. The supervisor ends the run at
the limit, and only a process without supervisor reaches this time."""
_KEPT_BYTES = 16 << 20
"""Bytes that an `AppendFile` keeps in memory for a disk that does not take them."""
_PROBE_BYTES = 1 << 20
DiskWait = dict[str, Any]
"""A wait in beats and in `status`: {path, errno, seconds, loose}. A wait is loose if no work of the
run depends on the write."""


def is_temporary(error: BaseException) -> bool:
    """Whether ``error`` means that a disk cannot be written now, but possibly later."""
    return isinstance(error, OSError) and error.errno in CURES


def describe_write_error(path: Path | str, error: OSError) -> str:
    """Message with the path that cannot be written, the cause, and what the user can do."""
    number = error.errno or 0
    return f"{path}: {os.strerror(number)}; {CURES.get(number, 'see its file system')}"


def describe_wait(wait: Mapping[str, Any]) -> str:
    """Message about a `DiskWait`.

    >>> describe_wait({"path": "/r/queue", "errno": errno.ENOSPC})
    '/r/queue: No space left on device; free space there, the run then continues'
    """
    error = OSError(wait["errno"], "")
    return f"{describe_write_error(wait['path'], error)}, the run then continues"


@dataclass(slots=True)
class _Wait:
    errno: int
    loose: bool
    since: float = field(default_factory=time.monotonic)
    failed_at: float = 0.0

    def counts(self) -> bool:
        """Whether the disk may still be full.

        The owner of a loose wait may have nothing to write for a long time. It then does not notice
        that there is room, so that its wait counts for some seconds only.
        """
        return not self.loose or time.monotonic() - self.failed_at < _LOOSE_S


class DiskWaits:
    """The writes of this process that fail at present, by path. Safe to use from threads."""

    def __init__(self) -> None:
        self.limit_s = math.inf
        """Seconds for which a write is tried again."""
        self._lock = threading.Lock()
        self._waits: dict[str, _Wait] = {}

    def begin(self, path: Path | str, error: OSError, loose: bool = False) -> float:
        """Note that ``path`` could not be written. Returns the seconds since the first failure.

        ``loose``: no work of the run depends on this write.
        """
        number = error.errno or 0
        with self._lock:
            wait = self._waits.setdefault(str(path), _Wait(number, loose))
            wait.errno, wait.loose, wait.failed_at = number, loose, time.monotonic()
            return wait.failed_at - wait.since

    def end(self, path: Path | str) -> None:
        """End the wait for ``path``: it was written, or no further try follows."""
        if self._waits:
            with self._lock:
                self._waits.pop(str(path), None)

    def __bool__(self) -> bool:
        """Whether any write fails at present."""
        return bool(self._waits)

    def longest(self) -> DiskWait:
        """The longest wait; a loose one only if all are loose. Empty: no write fails."""
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
    """Result of ``write``, which writes ``path`` completely, or undoes its changes and raises.

    It is tried again while its error `is_temporary`, for at most `DiskWaits.limit_s` seconds, and
    until ``until()`` is true.
    """
    for pause in _pauses():
        try:
            result = write()
        except OSError as error:
            is_final = not is_temporary(error) or until()
            if is_final or WAITS.begin(path, error) > WAITS.limit_s + _GRACE_S:
                WAITS.end(path)
                raise
            time.sleep(pause)
        except BaseException:
            WAITS.end(path)
            raise
        else:
            WAITS.end(path)
            return result
    raise AssertionError("unreachable")


def has_passed_in(seconds: float) -> Callable[[], bool]:
    """Function that returns whether ``seconds`` have passed since this call."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _pauses() -> Iterator[float]:
    pause = _MIN_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _MAX_PAUSE_S)


class WriteRetry:
    """State of a write that a loop tries again between other work. `is_due`: the time has come.

    >>> retry = WriteRetry(Path("/r/journal"))
    >>> retry.note_failure(OSError(errno.ENOSPC, "full"))
    >>> bool(retry), retry.is_due()
    (True, False)
    >>> retry.note_success()
    >>> bool(retry), retry.is_due()
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
        """Note that a try failed. Raises ``error`` unless it `is_temporary`."""
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
    """A file for people or tools to read, to which pieces of bytes are appended.

    Bytes that the disk does not take are kept and written later, up to a bound; further bytes are
    dropped. No write waits or fails.
    """

    def __init__(self, path: Path) -> None:
        """Append to ``path``, beginning with a new line."""
        self.path = path
        self.dropped = 0
        """Bytes that were dropped."""
        self._retry = WriteRetry(path, loose=True)
        self.closed = False
        self._file: int | None = None
        self._pending = bytearray()
        self.flush()

    def write(self, data: bytes) -> None:
        """Add ``data``, which the next successful `flush` writes. After `close` it is ignored."""
        if self.closed:
            return
        if len(self._pending) + len(data) <= _KEPT_BYTES:
            self._pending += data
        else:
            self.dropped += len(data)

    def flush(self) -> None:
        """Write the pending bytes if the disk takes them."""
        if (self._file is None or self._pending) and self._retry.is_due():
            try:
                self._write()
                self._retry.note_success()
            except OSError as error:
                self._retry.note_failure(error)

    @property
    def is_written(self) -> bool:
        """Whether no bytes are pending."""
        return self._file is not None and not self._pending

    def write_all(self) -> None:
        """Write the pending bytes, with `retry_write`."""
        retry_write(self.path, self._write)
        self._retry.note_success()

    def fileno(self) -> int:
        """Descriptor of the file. It exists after the first successful write."""
        assert self._file is not None
        return self._file

    def _write(self) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                # A writer that was killed has left half a line.
                self._pending[:0] = b"\n"
        while self._pending:
            del self._pending[: os.write(self._file, self._pending)]

    def close(self) -> None:
        """Close the file. Bytes that cannot be written now are lost. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self._retry.next_try = 0.0
        self.flush()
        WAITS.end(self.path)
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Printed(io.FileIO):
    """A descriptor to which this process prints, so that a print never ends the process.

    Text is dropped if the disk is full, the terminal is closed (EIO), or the reader of the pipe has
    ended (EPIPE).
    """

    is_cut = False
    """Whether the last line in the file may be incomplete."""

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
    """Let no later print of this process fail, see `_Printed`."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if unfiltered(stream) is not getattr(sys, f"__{name}__"):
            # A test or a notebook has replaced the stream to capture the text.
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
    """Wait until ``folder`` can be written, see `retry_write`."""
    retry_write(folder / "", lambda: _probe(folder))


def _probe(folder: Path, size: int = _PROBE_BYTES) -> None:
    path = folder / f".probe-{os.getpid()}"
    try:
        with path.open("wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def probe_folder(folder: Path, size: int = _PROBE_BYTES) -> DiskWait:
    """Write and remove ``size`` bytes in ``folder``. Returns the wait that this would need; empty:
    none."""
    try:
        _probe(folder, size)
    except OSError as error:
        if not is_temporary(error):
            raise
        return {"path": str(folder), "errno": error.errno, "seconds": 0.0, "loose": False}
    return {}
