"""Indexed files of prompts: the index holds the offset of each line that is a prompt.

The index is made once, when a run is prepared, and is stored in the run directory. Each process
loads it into memory. It reads and tokenizes a line when its prompt is used. If a file has changed
since it was indexed, it is refused, because tickets would get other prompts. Rows of tables, and of
several files, are written as lines into a file next to the index.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import xxhash

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.rundir import write_atomic
from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.prompts import Prompt, PromptRules, RowCounts
from relax_hpc.data.row_files import RowFiles, RowLocations
from relax_hpc.data.rows import BadLine, Line, Row, open_rows, read_lines, row_of
from relax_hpc.data.tokenizer import Tokenizer

FORMAT = 3
"""Version of the index. Increase it if the same rules make other prompts: an older index is then
made again."""
ENTRY = np.dtype([("start", "<u8"), ("size", "<u4"), ("check", "<u4"), ("line", "<u4")])
"""Entry of a prompt: offset of its line, size in bytes, CRC-32, line number from 1."""
_ENTRY = struct.Struct("<QIII")
KEPT_BAD = 10_000
"""Maximum number of bad lines that are stored one by one. Further ones are only counted."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Stamp:
    """Sizes, times and digest of the files that were indexed."""

    path: str
    """Name of the files in the configuration."""
    size: int
    """Bytes of all files."""
    mtime_ns: int
    """Sum of their modification times."""
    digest: str = ""
    """XXH3 of all their bytes, 128 bits."""

    @classmethod
    def from_files(cls, files: RowFiles) -> Stamp:
        """Stamp of ``files``, without the digest. ConfigError: a file is missing."""
        try:
            stats = [path.stat() for path in files.paths]
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: cannot be read: {error.strerror}; data.train and data.eval "
                "name files of rows, or folders of them"
            ) from error
        size, mtime_ns = (
            sum(stat.st_size for stat in stats),
            sum(stat.st_mtime_ns for stat in stats),
        )
        return cls(files.named, size, mtime_ns)

    def is_unchanged(self, current: Stamp, files: RowFiles) -> bool:
        """Whether the ``files``, with the ``current`` stamp, have the same content. Files that were
        only copied or touched have."""
        if self.size != current.size:
            return False
        return self.mtime_ns == current.mtime_ns or self.digest == hash_files(files)


@dataclass(slots=True)
class Index:
    """Index of the prompts of one file or several."""

    stamp: Stamp
    rules: str
    """Key of the rules by which rows became prompts, see `rules_key`."""
    rows: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """Number of bad lines by reason."""
    bad: list[BadLine] = field(default_factory=list)
    entries: np.ndarray = field(default_factory=lambda: np.zeros(0, ENTRY))
    """ENTRY [prompts]."""
    locations: RowLocations = field(default_factory=RowLocations)
    order: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Values of the column `data.order_by`, float64 [prompts]."""

    def count_rows(self) -> RowCounts:
        """Counts of all rows and of bad ones."""
        return RowCounts(self.rows, self.counts, self.bad, self.locations)


class PromptFile(Sequence[Prompt]):
    """The prompts of one file or several, in their order. Threads may share it."""

    def __init__(
        self, lines: Path, index: Index, index_path: Path, tokenizer: Tokenizer, rules: PromptRules
    ) -> None:
        """``lines``: the file with the rows of ``index``, which is stored at ``index_path``."""
        self._index, self._lines, self._index_path = index, lines, index_path
        self._tokenizer, self._rules = tokenizer, rules
        self._file = os.open(lines, os.O_RDONLY)

    def __del__(self) -> None:
        # `os.open` may have failed.
        file = getattr(self, "_file", 0)
        if file:
            os.close(file)

    @property
    def bad(self) -> list[BadLine]:
        """The first KEPT_BAD lines that are not prompts."""
        return self._index.bad

    def location_of(self, line: int) -> str:
        """File and line of row ``line``, for messages."""
        return self._index.locations.describe(line)

    def bad_rows(self) -> Iterator[tuple[str, str]]:
        """Location and reason of the first KEPT_BAD rows that cannot be used."""
        return ((self.location_of(line.line), line.reason) for line in self.bad)

    def bad_rows_note(self) -> str:
        """Note on the rows that cannot be used; empty if all rows can."""
        counts = self._index.count_rows()
        if not counts.bad:
            return ""
        return f"{counts.bad} of {counts.rows} rows are left out: {counts.reasons}"

    @property
    def order(self) -> np.ndarray:
        """Values of the column `data.order_by`, float64 [prompts]."""
        return self._index.order

    def __len__(self) -> int:
        return len(self._index.entries)

    @overload
    def __getitem__(self, number: int) -> Prompt: ...
    @overload
    def __getitem__(self, number: slice) -> list[Prompt]: ...
    def __getitem__(self, number: int | slice) -> Prompt | list[Prompt]:
        """ConfigError: the file has changed since it was indexed. RelaxError: it cannot be read
        now."""
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        line = self._read_line(number)
        row = row_of(line)
        if isinstance(row, BadLine):
            raise self._no_prompt_error(row)
        _, record = row
        prompt = self._rules.parse_row(line.number, record, self._tokenizer)
        if not isinstance(prompt, BadLine):
            return prompt
        if prompt.reason in set(Reason):
            fault = UnusableMedium(Reason(prompt.reason), prompt.detail)
            return self._rules.unusable(line.number, record, fault)
        raise self._no_prompt_error(prompt)

    def _read_line(self, number: int) -> Line:
        """The line of prompt ``number``. ConfigError, RelaxError: see `__getitem__`."""
        start, size, check, line = self._index.entries[number].item()
        try:
            data = os.pread(self._file, size, start)
        except OSError as error:
            raise RelaxError(
                f"{self._lines}: {self.location_of(line)} cannot be read: {error.strerror}"
            ) from error
        if len(data) != size or zlib.crc32(data) != check:
            difference = f"{self.location_of(line)} is another"
            raise _changed_error(self._index.stamp, self._index_path, difference)
        return Line(line, start, data)

    def _no_prompt_error(self, bad: BadLine) -> RelaxError:
        return RelaxError(
            f"{self._lines}: {self.location_of(bad.line)} was a prompt when it was indexed: "
            f"{bad.reason}: {bad.detail}"
        )


class PromptSets(Sequence[Prompt]):
    """The prompts of several sets. Their numbers continue from set to set."""

    def __init__(self, sets: Mapping[str, PromptFile]) -> None:
        self.sets = dict(sets)
        self._starts = [0, *accumulate(map(len, self.sets.values()))]
        self._files = list(self.sets.values())

    @property
    def order(self) -> np.ndarray:
        """Values of the column `data.order_by`, float64 [prompts]."""
        return np.concatenate([file.order for file in self._files])

    def bad_rows(self) -> Iterator[tuple[str, str]]:
        """See `PromptFile`."""
        for name, file in self.sets.items():
            for location, reason in file.bad_rows():
                yield f"{name}: {location}", reason

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, number: int) -> Prompt: ...
    @overload
    def __getitem__(self, number: slice) -> list[Prompt]: ...
    def __getitem__(self, number: int | slice) -> Prompt | list[Prompt]:
        """See `PromptFile`."""
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        chosen = bisect.bisect_right(self._starts, number) - 1
        return self._files[chosen][number - self._starts[chosen]]


def open_prompts(
    named: Path | str | RowFiles,
    index_path: Path,
    tokenizer: Tokenizer,
    rules: PromptRules,
    max_bad_share: float,
) -> PromptFile:
    """The prompts of the files that ``named`` refers to, see `RowFiles`. If ``index_path`` has no
    index of these files, it is made.

    ConfigError: no such file, no usable line, a larger share of bad lines than ``max_bad_share``,
    or the files or the rules have changed since the index was made.
    """
    files = named if isinstance(named, RowFiles) else RowFiles.from_path(named)
    key, lines = rules_key(tokenizer, rules), _lines_path(files, index_path)
    index = _load_checked(files, index_path, key)
    if not (index and lines.is_file()):
        with rules.rendering():
            index = build_index(files, index_path, key, tokenizer, rules)
    problem = index.count_rows().problem(max_bad_share, index.rows)
    if problem:
        index_path.unlink(missing_ok=True)
        raise ConfigError(f"{files.named}: {problem}")
    return PromptFile(lines, index, index_path, tokenizer, rules)


def check_same(files: RowFiles, index_path: Path, tokenizer: Tokenizer, rules: PromptRules) -> None:
    """ConfigError: ``files``, or the rules by which their rows become prompts, have changed since
    the index at ``index_path`` was made."""
    _load_checked(files, index_path, rules_key(tokenizer, rules))


def _load_checked(files: RowFiles, index_path: Path, key: str) -> Index | None:
    """The index at ``index_path``; None: it is missing, damaged, or of other files. ConfigError:
    ``files`` have changed or cannot be read, or the rules have another ``key``."""
    current, index = Stamp.from_files(files), load_index(index_path)
    if not index or index.stamp.path != current.path:
        return None
    if not index.stamp.is_unchanged(current, files):
        difference = "other bytes, as many as before"
        if current.size != index.stamp.size:
            difference = f"found {current.size} bytes, had {index.stamp.size}"
        raise _changed_error(index.stamp, index_path, difference)
    if index.rules != key:
        raise ConfigError(
            f"{index.stamp.path}: its rows would become other prompts than when the run began: the "
            "chat template, the tokenizer, the tools or a setting of rows has changed; restore it, "
            f"or remove {index_path} to continue with it as it is"
        )
    return index


def _changed_error(stamp: Stamp, index_path: Path, difference: str) -> ConfigError:
    return ConfigError(
        f"{stamp.path}: has changed since the run began ({difference}), so that tickets would get "
        f"other prompts; restore it, or remove {index_path} to continue with it as it is"
    )


def rules_key(tokenizer: Tokenizer, rules: PromptRules) -> str:
    """Key of everything that decides which lines are prompts, and which tokens they have."""
    parts = [FORMAT, *rules.key_parts(), tokenizer.key]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def hash_files(files: RowFiles) -> str:
    """XXH3 of all files together. ConfigError: a file cannot be read."""
    digest = xxhash.xxh3_128()
    for path in files.paths:
        with open_rows(path) as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
    return digest.hexdigest()


def build_index(
    files: RowFiles, index_path: Path, key: str, tokenizer: Tokenizer, rules: PromptRules
) -> Index:
    """Read all ``files`` once, and write their index to ``index_path``."""
    index_path.parent.mkdir(parents=True, exist_ok=True)
    stamp, digest, locations = Stamp.from_files(files), xxhash.xxh3_128(), RowLocations()
    scan = _Scan(tokenizer, rules)
    if files.lines:
        rows = _rows(files.lines, digest.update)
    else:
        rows = _spooled_rows(files, index_path, rules, locations)
    for line, row in rows:
        scan.add(line, row)
    if Stamp.from_files(files) != stamp:
        raise ConfigError(
            f"{files.named}: has changed while it was read; write it whole before a run begins"
        )
    stamp = replace(stamp, digest=digest.hexdigest() if files.lines else hash_files(files))
    index = scan.finish(stamp, key, _lines_path(files, index_path), locations)
    _save_index(index, index_path)
    return index


class _Scan:
    """One pass over all lines, which collects the entries of the index."""

    def __init__(self, tokenizer: Tokenizer, rules: PromptRules) -> None:
        self._tokenizer, self._rules = tokenizer, rules
        self._counts = RowCounts()
        # Packed, because a file may have millions of rows.
        self._entries, self._ids, self._order = bytearray(), bytearray(), array("d")
        self._bad: list[BadLine] = []

    def add(self, line: Line, row: Row) -> None:
        """Add ``row``, which was read from ``line``."""
        prompt: Any = row
        if not isinstance(row, BadLine):
            prompt = self._rules.parse_row(*row, self._tokenizer, tokens=False)
        self._counts.add(prompt)
        if isinstance(prompt, BadLine):
            if len(self._bad) < KEPT_BAD:
                self._bad.append(prompt)
            return
        self._entries += _ENTRY.pack(line.start, len(line.data), zlib.crc32(line.data), line.number)
        self._order.append(prompt.order)
        self._ids += hashlib.blake2b(prompt.prompt_id.encode(), digest_size=16).digest()

    def finish(self, stamp: Stamp, key: str, lines: Path, locations: RowLocations) -> Index:
        """Index of all added rows. Of rows with equal ids the first one counts, the others are
        bad."""
        entries, order = np.frombuffer(bytes(self._entries), ENTRY), np.array(self._order)
        repeated = _find_repeated(np.frombuffer(bytes(self._ids), "<u8").reshape(-1, 2))
        for entry in entries[repeated]:
            bad = BadLine(int(entry["line"]), "duplicate_id", f"id {self._id_at(lines, entry)}")
            self._counts.count(bad)
            self._bad.append(bad)
        return Index(
            stamp,
            key,
            self._counts.rows,
            dict(self._counts.counts),
            sorted(self._bad, key=lambda bad: bad.line)[:KEPT_BAD],
            entries[~repeated],
            locations,
            order[~repeated],
        )

    def _id_at(self, lines: Path, entry: np.void) -> str:
        with lines.open("rb") as file:
            file.seek(int(entry["start"]))
            record = json.loads(file.read(int(entry["size"])))
        columns = self._rules.columns
        return columns.id_of(columns.renamed(record), int(entry["line"]))


def _find_repeated(ids: np.ndarray) -> np.ndarray:
    """Whether an equal row of ``ids``, uint64 [prompts, 2], comes before: bool [prompts]."""
    order = np.lexsort((ids[:, 1], ids[:, 0]))
    repeated = np.zeros(len(ids), bool)
    repeated[order[1:]] = (ids[order[1:]] == ids[order[:-1]]).all(axis=1)
    return repeated


def _lines_path(files: RowFiles, index_path: Path) -> Path:
    """The file whose lines are the rows: the only one of ``files``, or the file that
    `_spooled_rows` writes."""
    return files.lines or index_path.with_suffix(".lines")


def _rows(path: Path, on_bytes: Callable[[bytes], None]) -> Iterator[tuple[Line, Row]]:
    return ((line, row_of(line)) for line in read_lines(path, on_bytes) if not line.is_blank)


def _spooled_rows(
    files: RowFiles, index_path: Path, rules: PromptRules, locations: RowLocations
) -> Iterator[tuple[Line, Row]]:
    """Rows of tables, or of several files. They are also written as lines next to the index."""
    lines = _lines_path(files, index_path)
    partial, start = lines.with_name(f".{lines.name}.{os.getpid()}"), 0
    try:
        with partial.open("wb") as file:
            for row in files.rows(locations, rules.media is not None):
                number, record = (row.line, None) if isinstance(row, BadLine) else row
                data = json.dumps(record).encode() + b"\n"
                file.write(data)
                yield Line(number, start, data), row
                start += len(data)
        partial.replace(lines)
    finally:
        partial.unlink(missing_ok=True)


def _save_index(index: Index, path: Path) -> None:
    header = {
        "stamp": asdict(index.stamp),
        "rules": index.rules,
        "rows": index.rows,
        "counts": index.counts,
        "format": FORMAT,
        "prompts": len(index.entries),
        "bad": [astuple(bad) for bad in index.bad],
        "begins": index.locations.begins,
    }
    head = json.dumps(header).encode() + b"\n"
    tail = index.entries.tobytes() + index.order.tobytes()
    retry_write(path, lambda: write_atomic(path, head, tail=tail))


def load_index(path: Path) -> Index | None:
    """The index at ``path``; None: it is missing, damaged, or of another format."""
    try:
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.readline())
            if header["format"] != FORMAT:
                return None
            # Read, not mapped: if a shared filesystem fails, a read raises OSError, but an access
            # to mapped memory ends the process with SIGBUS.
            count = header["prompts"]
            entries = np.frombuffer(file.read(count * ENTRY.itemsize), ENTRY)
            order = np.frombuffer(file.read())
        if len(entries) != count or len(order) != count:
            return None
        bad = [BadLine(*fields) for fields in header["bad"]]
        locations = RowLocations([(begin, str(name)) for begin, name in header["begins"]])
        stamp, rules = Stamp(**header["stamp"]), header["rules"]
        rows, counts = header["rows"], header["counts"]
        return Index(stamp, rules, rows, counts, bad, entries, locations, order)
    except (OSError, ValueError, TypeError, LookupError):
        return None
