"""Files of prompts of which an index is in memory: which lines are prompts, and where they stand.

The index is made once a run, when it is prepared, and lies in its directory. Each process has it in
memory, reads a line when its prompt is used, and makes tokens of it then. A file that is not the
one that was indexed is refused: its tickets would have other prompts. The rows of tables, and of
several files, are written out as lines beside the index.
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
from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.prompts import Prompt, PromptRules, Tally
from relax_hpc.data.row_files import Places, RowFiles
from relax_hpc.data.rows import BadLine, Line, Row, opened, read_lines, row_of
from relax_hpc.data.tokenizer import Tokenizer

FORMAT = 3
"""Number of the format; a higher one whenever the same rules make other prompts: the index is made
again then."""
ENTRY = np.dtype([("start", "<u8"), ("size", "<u4"), ("check", "<u4"), ("line", "<u4")])
"""Entry of a prompt: where its line begins, its bytes and their CRC-32, its number from 1."""
_ENTRY = struct.Struct("<QIII")
KEPT_BAD = 10_000
"""Bad lines that are known one by one; beyond these only their number is."""
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Stamp:
    """Stamp of the files that were indexed."""

    path: str
    """Name of them in the configuration."""
    size: int
    """Bytes of all."""
    mtime_ns: int
    """Sum of their times of change."""
    digest: str = ""
    """XXH3 of all their bytes, 128 bits."""

    @classmethod
    def of(cls, files: RowFiles) -> Stamp:
        """Stamp of ``files``, without the digest. ConfigError: one is not there."""
        try:
            found = [path.stat() for path in files.paths]
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: cannot be read: {error.strerror}; data.train and data.eval "
                "name files of rows, or folders of them"
            ) from error
        return cls(
            files.named, sum(one.st_size for one in found), sum(one.st_mtime_ns for one in found)
        )

    def is_still(self, now: Stamp, files: RowFiles) -> bool:
        """Whether the ``files`` that are there ``now`` are the same: those that were copied, or
        touched, are."""
        if self.size != now.size:
            return False
        return self.mtime_ns == now.mtime_ns or self.digest == digest_of(files)


@dataclass(slots=True)
class Index:
    """Index of the prompts of a file, or several."""

    stamp: Stamp
    rules: str
    """Rules by which rows became prompts, see `rules_key`."""
    rows: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """Bad lines by reason."""
    bad: list[BadLine] = field(default_factory=list)
    entries: np.ndarray = field(default_factory=lambda: np.zeros(0, ENTRY))
    places: Places = field(default_factory=Places)
    order: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Values of the column `data.order_by`, float64, one for each entry."""


class PromptFile(Sequence[Prompt]):
    """The prompts of one file or several, in their order; safe to use from threads."""

    def __init__(
        self, lines: Path, index: Index, where: Path, tokenizer: Tokenizer, how: PromptRules
    ) -> None:
        """``lines``: the file with the rows of the ``index``, which lies at ``where``."""
        self.index, self._lines, self._where = index, lines, where
        self._tokenizer, self._how = tokenizer, how
        self._file = os.open(lines, os.O_RDONLY)

    def __del__(self) -> None:
        if file := getattr(self, "_file", 0):
            os.close(file)

    @property
    def bad(self) -> list[BadLine]:
        """The first of the lines that are no prompts."""
        return self.index.bad

    def place_of(self, line: int) -> str:
        """Place of a line in the files, in words."""
        return self.index.places.of(line)

    def bad_rows(self) -> Iterator[tuple[str, str]]:
        """Place and reason of the first rows that cannot be used."""
        return ((self.place_of(line.line), line.reason) for line in self.bad)

    def left_out(self) -> str:
        """Note on the rows that cannot be used; empty if there are none."""
        index = self.index
        tally = Tally(index.rows, index.counts, index.bad, index.places)
        return (
            f"{tally.bad} of {tally.rows} rows are left out: {tally.reasons}" if tally.bad else ""
        )

    @property
    def order(self) -> np.ndarray:
        """Values of the column `data.order_by`, float64 [rows]."""
        return self.index.order

    def __len__(self) -> int:
        return len(self.index.entries)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        """ConfigError: the file was changed since it was indexed. RelaxError: it cannot be read
        now."""
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        start, size, check, number = self.index.entries[place].item()
        try:
            data = os.pread(self._file, size, start)
        except OSError as error:
            raise RelaxError(
                f"{self._lines}: {self.place_of(number)} cannot be read: {error.strerror}"
            ) from error
        if len(data) != size or zlib.crc32(data) != check:
            raise changed(self.index.stamp, self._where, f"{self.place_of(number)} is another")
        record = row_of(Line(number, start, data))
        made = (
            record
            if isinstance(record, BadLine)
            else self._how.read(number, record[1], self._tokenizer)
        )
        if isinstance(made, BadLine) and made.reason in set(Reason):
            return self._how.unusable(
                number, record[1], BadMedium(Reason(made.reason), made.detail)
            )
        if isinstance(made, BadLine):
            raise RelaxError(
                f"{self._lines}: {self.place_of(number)} was a prompt when it was indexed: "
                f"{made.reason}: {made.detail}"
            )
        return made


class PromptSets(Sequence[Prompt]):
    """The prompts of several sets, numbered through."""

    def __init__(self, sets: Mapping[str, PromptFile]) -> None:
        self.sets = dict(sets)
        self._starts = [0, *accumulate(map(len, self.sets.values()))]
        self._files = list(self.sets.values())

    @property
    def order(self) -> np.ndarray:
        """Values of the column `data.order_by`, float64 [rows]."""
        return np.concatenate([file.order for file in self._files])

    def bad_rows(self) -> Iterator[tuple[str, str]]:
        """See `PromptFile`."""
        for name, file in self.sets.items():
            yield from ((f"{name}: {place}", reason) for place, reason in file.bad_rows())

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
    where: Path,
    tokenizer: Tokenizer,
    how: PromptRules,
    max_bad_share: float,
) -> PromptFile:
    """The prompts of the files that are ``named``, see `RowFiles`, whose index is at ``where``; it
    is made if it is not there, or of other files.

    ConfigError: no such file, no usable line, a larger share of bad lines than ``max_bad_share``,
    or the files or the rules are not what they were when the index was made.
    """
    files = named if isinstance(named, RowFiles) else RowFiles.of(named)
    key, lines = rules_key(tokenizer, how), _lines_of(files, where)
    index = _index_of(files, where, key)
    if not (index and lines.is_file()):
        with how.rendering():
            index = build(files, where, key, tokenizer, how)
    tally = Tally(index.rows, index.counts, index.bad, index.places)
    if problem := tally.problem(max_bad_share, index.rows):
        where.unlink(missing_ok=True)
        raise ConfigError(f"{files.named}: {problem}")
    return PromptFile(lines, index, where, tokenizer, how)


def check_same(files: RowFiles, where: Path, tokenizer: Tokenizer, how: PromptRules) -> None:
    """ConfigError: ``files``, or the rules by which their rows become prompts, are not what they
    were when the index at ``where`` was made."""
    _index_of(files, where, rules_key(tokenizer, how))


def _index_of(files: RowFiles, where: Path, rules: str) -> Index | None:
    """The index at ``where``, if it is one of ``files``. ConfigError: these are not what they were,
    or cannot be read, or the ``rules`` are not."""
    now, index = Stamp.of(files), load(where)
    if not index or index.stamp.path != now.path:
        return None
    if not index.stamp.is_still(now, files):
        sizes = f"found {now.size} bytes, had {index.stamp.size}"
        raise changed(
            index.stamp,
            where,
            sizes if now.size != index.stamp.size else "other bytes, as many as before",
        )
    if index.rules != rules:
        raise ConfigError(
            f"{index.stamp.path}: its rows would become other prompts than when the run began: the "
            "chat template, the "
            "tokenizer, the tools or a setting of rows has changed; restore it, or remove "
            f"{where} to continue with it as it is"
        )
    return index


def changed(stamp: Stamp, where: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{stamp.path}: has changed since the run began ({what}), so that tickets would get other "
        f"prompts; restore it, or remove {where} to go on with it as it is"
    )


def rules_key(tokenizer: Tokenizer, how: PromptRules) -> str:
    """Key of all that decides which lines are prompts."""
    about = [FORMAT, *how.about(), tokenizer.key]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def digest_of(files: RowFiles) -> str:
    """XXH3 of all files together. ConfigError: one cannot be read."""
    digest = xxhash.xxh3_128()
    for path in files.paths:
        with opened(path) as file:
            while data := file.read(_AT_ONCE):
                digest.update(data)
    return digest.hexdigest()


def build(files: RowFiles, where: Path, key: str, tokenizer: Tokenizer, how: PromptRules) -> Index:
    """Read all ``files`` once, and write their index to ``where``."""
    where.parent.mkdir(parents=True, exist_ok=True)
    before, digest, places = Stamp.of(files), xxhash.xxh3_128(), Places()
    scan, own = _Scan(tokenizer, how), files.lines
    for line, row in _rows(own, digest.update) if own else _spooled(files, where, how, places):
        scan.add(line, row)
    if Stamp.of(files) != before:
        raise ConfigError(
            f"{files.named}: has changed while it was read; write it whole before a run begins"
        )
    stamp = replace(before, digest=digest.hexdigest() if own else digest_of(files))
    index = scan.index(stamp, key, _lines_of(files, where), places)
    _save(index, where)
    return index


class _Scan:
    """Findings of one pass over the lines."""

    def __init__(self, tokenizer: Tokenizer, how: PromptRules) -> None:
        self._tokenizer, self._how = tokenizer, how
        self._tally = Tally()
        self._entries, self._ids, self._order = bytearray(), bytearray(), array("d")
        self._bad: list[BadLine] = []

    def add(self, line: Line, row: Row) -> None:
        """Take ``row``, which stands in ``line``."""
        found = (
            row if isinstance(row, BadLine) else self._how.read(*row, self._tokenizer, tokens=False)
        )
        self._tally.add(found)
        if isinstance(found, BadLine):
            if len(self._bad) < KEPT_BAD:
                self._bad.append(found)
            return
        self._entries += _ENTRY.pack(line.start, len(line.data), zlib.crc32(line.data), line.number)
        self._order.append(found.order)
        self._ids += hashlib.blake2b(found.prompt_id.encode(), digest_size=16).digest()

    def index(self, stamp: Stamp, key: str, lines: Path, places: Places) -> Index:
        entries, order = np.frombuffer(bytes(self._entries), ENTRY), np.array(self._order)
        again = _repeated(np.frombuffer(bytes(self._ids), "<u8").reshape(-1, 2))
        for entry in entries[again]:
            bad = BadLine(int(entry["line"]), "duplicate_id", f"id {self._id_at(lines, entry)}")
            self._tally.count(bad)
            self._bad.append(bad)
        self._bad = sorted(self._bad, key=lambda bad: bad.line)[:KEPT_BAD]
        counts = dict(self._tally.counts)
        return Index(
            stamp, key, self._tally.rows, counts, self._bad, entries[~again], places, order[~again]
        )

    def _id_at(self, lines: Path, entry: np.void) -> str:
        with lines.open("rb") as file:
            file.seek(int(entry["start"]))
            record = json.loads(file.read(int(entry["size"])))
        return self._how.columns.id_of(self._how.columns.renamed(record), int(entry["line"]))


def _repeated(ids: np.ndarray) -> np.ndarray:
    """Whether each of the rows of numbers has come before. One pass, with as much memory again."""
    order = np.lexsort((ids[:, 1], ids[:, 0]))
    again = np.zeros(len(ids), bool)
    again[order[1:]] = (ids[order[1:]] == ids[order[:-1]]).all(axis=1)
    return again


def _lines_of(files: RowFiles, where: Path) -> Path:
    """The file with the lines of ``files``: that itself, or what was written out of them."""
    return files.lines or where.with_suffix(".lines")


def _rows(path: Path, told: Callable[[bytes], None]) -> Iterator[tuple[Line, Row]]:
    return ((line, row_of(line)) for line in read_lines(path, told) if not line.is_blank)


def _spooled(
    files: RowFiles, where: Path, how: PromptRules, places: Places
) -> Iterator[tuple[Line, Row]]:
    """Rows of tables, or several files, which are written beside the index as lines."""
    lines = _lines_of(files, where)
    partial, start = lines.with_name(f".{lines.name}.{os.getpid()}"), 0
    try:
        with partial.open("wb") as file:
            for row in files.rows(places, how.media is not None):
                number, record = (row.line, None) if isinstance(row, BadLine) else row
                data = json.dumps(record).encode() + b"\n"
                file.write(data)
                yield Line(number, start, data), row
                start += len(data)
        partial.replace(lines)
    finally:
        partial.unlink(missing_ok=True)


def _save(index: Index, where: Path) -> None:
    about = {
        "stamp": asdict(index.stamp),
        "rules": index.rules,
        "rows": index.rows,
        "counts": index.counts,
    }
    about |= {
        "format": FORMAT,
        "prompts": len(index.entries),
        "bad": [astuple(bad) for bad in index.bad],
    }
    about["begins"] = index.places.begins
    head = json.dumps(about).encode() + b"\n"
    tail = index.entries.tobytes() + index.order.tobytes()
    retry_write(where, lambda: write_atomic(where, head, tail=tail))


def load(where: Path) -> Index | None:
    """The index at ``where``; None: there is none that is whole."""
    try:
        with where.open("rb") as file:
            about: dict[str, Any] = json.loads(file.readline())
            if about["format"] != FORMAT:
                return None
            # Not mapped: what a shared filesystem cannot read is an error then, and no signal.
            count = about["prompts"]
            entries = np.frombuffer(file.read(count * ENTRY.itemsize), ENTRY)
            order = np.frombuffer(file.read())
        if len(entries) != count or len(order) != count:
            return None
        bad = [BadLine(*each) for each in about["bad"]]
        places = Places([(begin, str(name)) for begin, name in about["begins"]])
        stamp, rules = Stamp(**about["stamp"]), about["rules"]
        return Index(stamp, rules, about["rows"], about["counts"], bad, entries, places, order)
    except (OSError, ValueError, TypeError, LookupError):
        return None
