"""Reading of a run's journal and its replay, while the run may write it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from relax_hpc.base.foreign_files import open_in_run
from relax_hpc.base.rundir import RunDir
from relax_hpc.queue.controller.journal import Journal, JournalError, Position
from relax_hpc.queue.controller.state.events import EventBatch
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.records import Event

AFTER_ALL_INCARNATIONS = 999_999
MALFORMED = LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError
"""Errors of records that this package has not written."""
_CHUNK_BYTES = 1 << 20


class DifferentJournalError(JournalError):
    """The journal does not begin with the bytes that a summary was made of."""


@dataclass(frozen=True, slots=True)
class JournalPrefix:
    """A beginning of the journal."""

    files: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Incarnation -> bytes of its file, and their checksum."""

    @property
    def position(self) -> Position | None:
        """Position after the prefix; None: it is empty."""
        if not self.files:
            return None
        newest = max(self.files)
        return Position(newest, self.files[newest][0])


class JournalCopy:
    """The journal as it is now, also of a live run. Its files are opened once, the newest first,
    because it seals the others."""

    def __init__(self, run: RunDir, after: JournalPrefix | None = None) -> None:
        """``after``: read only the records that follow, and check the bytes before."""
        self.folder = run.journal
        self.after = after or JournalPrefix()
        self.torn: dict[str, int] = {}
        """File -> bytes after its last record that counts: an incomplete record of a crash, or
        records that were written after a successor started."""
        self.read = self.after
        """The bytes whose records were read. Complete after the last record."""

    def records(self) -> Iterator[dict[str, Any]]:
        """All records in order. JournalError, naming the file and the offset: a record before the
        end is damaged. DifferentJournalError: the journal does not begin with `after`."""
        if not self.folder.is_dir():
            if self.after.files:
                raise DifferentJournalError(f"{self.folder}: missing")
            return
        with self._links() as (folder, sizes):
            journal = _UnsealedJournal(folder, AFTER_ALL_INCARNATIONS, durable=False)
            try:
                self._check_prefix(folder, journal)
                yield from journal.replay(self.after.position)
                self._note_end(folder, journal.lengths, sizes)
            except DifferentJournalError:
                raise
            except JournalError as error:
                raise JournalError(str(error).replace(str(folder), str(self.folder))) from None
            except MALFORMED as error:
                raise JournalError(
                    f"{self.folder}: not laid out as a journal: {error!r}"
                ) from error
            finally:
                journal.close()

    @contextmanager
    def _links(self) -> Iterator[tuple[Path, dict[str, int]]]:
        """A folder with links to the open files, and the size of each when it was opened."""
        with TemporaryDirectory() as name, ExitStack() as stack:
            folder, sizes = Path(name), dict[str, int]()
            for path in sorted(filter(Path.is_file, self.folder.iterdir()), reverse=True):
                file = stack.enter_context(open_in_run(path))
                sizes[path.name] = Path(f"/proc/self/fd/{file.fileno()}").stat().st_size
                # Another user may replace the file by a FIFO. The open file stays the same.
                (folder / path.name).symlink_to(f"/proc/self/fd/{file.fileno()}")
            yield folder, sizes

    def _check_prefix(self, folder: Path, journal: Journal) -> None:
        position = self.after.position
        if position is None:
            return
        is_same = journal.covers(position)
        for incarnation, (length, crc) in self.after.files.items():
            path = folder / _file_name(incarnation)
            is_same = is_same and path.exists() and checksum(path, 0, length) == crc
        if not is_same:
            raise DifferentJournalError(f"{self.folder}: differs from its summary")

    def _note_end(self, folder: Path, lengths: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        files = dict[int, tuple[int, int]]()
        for name, end in lengths.items():
            incarnation, file_name = int(name), _file_name(int(name))
            start, crc = self.after.files.get(incarnation, (0, 0))
            if end < start:
                raise DifferentJournalError(f"{self.folder}: {file_name} is sealed before {start}")
            files[incarnation] = (end, checksum(folder / file_name, start, end, crc))
            self.torn[file_name] = max(0, sizes[file_name] - end)
        self.read = JournalPrefix(files)

    def replay(
        self, state: QueueState, before: Callable[[dict[str, Any]], None] = lambda record: None
    ) -> Iterator[list[Event | EventBatch]]:
        """Apply all records to ``state``; the events of each, see `expand`. ``before`` is called
        with each record before it is applied.

        JournalError: also if a record cannot follow the earlier ones.
        """
        for number, record in enumerate(self.records(), start=1):
            try:
                before(record)
                state.apply(record)
            except MALFORMED as error:
                text = (
                    f"{self.folder}: record {number} ({record.get('op')}) cannot follow the "
                    f"records before it: {error!r}"
                )
                raise JournalError(text) from error
            yield state.events.take_batches()


class _UnsealedJournal(Journal):
    """A journal that writes nothing. It keeps the lengths that its seal would contain."""

    def append(self, record: dict[str, Any]) -> None:
        self.lengths: dict[str, int] = record["lengths"]


def journal_records(run: RunDir) -> Iterator[dict[str, Any]]:
    """All records of the controllers of ``run``, in order. The run's own files do not change."""
    return JournalCopy(run).records()


def checksum(path: Path, start: int, end: int, crc: int = 0) -> int:
    """crc of the bytes ``start`` to ``end`` of a file, continuing ``crc``; -1: it is shorter."""
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            chunk = file.read(min(_CHUNK_BYTES, end - start))
            if not chunk:
                return -1
            crc = zlib.crc32(chunk, crc)
            start += len(chunk)
    return crc


def _file_name(incarnation: int) -> str:
    return f"inc-{incarnation:06d}.journal"
