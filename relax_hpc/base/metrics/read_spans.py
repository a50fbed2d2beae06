"""Reads the spans of a run from its files."""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.base.block_summaries import (
    BlockFormat,
    cut_after_line,
    read_blocks,
    read_packed_file,
    read_with_summary,
    summary_of,
)
from relax_hpc.base.foreign_files import parse_json, read_lines
from relax_hpc.base.log_rotation import MAX_FILE_BYTES, read_rotated_lines, rotated_files
from relax_hpc.base.metrics.accounting import Interval
from relax_hpc.base.metrics.span_table import Span, SpanKind, SpanTable
from relax_hpc.base.rundir import is_map

SPAN_FILES = "logs/*/inc-*/spans-*.jsonl"
"""Pattern of the newest files of spans in a run directory."""
_KIND = np.dtype(np.uint32)
_FILE = re.compile(r"inc-(\d{6})/spans-(\w+)-(\d+)\.jsonl", re.ASCII)
_TEXT, _TIME = (str, type(None)), (int, float)
_Kinds = dict[str, type | tuple[type, ...]]
_CLOCK: _Kinds = {
    "role": str,
    "boot": str,
    "wall": _TIME,
    "monotonic": _TIME,
    "began": (*_TIME, type(None)),
}
_SPAN: _Kinds = {
    "role": str,
    "what": str,
    "step": (int, type(None)),
    "start": _TIME,
    "end": _TIME,
    "peer": _TEXT,
    "reason": _TEXT,
    "lane": _TEXT,
}
_STAGE: _Kinds = {"role": str, "stage": str, "lane": str, "start": _TIME, "end": _TIME}
_LONGEST = 1e12
"""Bound of times in seconds. A larger number is not a measured time."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of a start, [start, end] in wall-clock seconds; see `start_stages`."""

    name: str
    lane: str
    """Engine that starts; empty: the role itself."""
    start: float
    end: float


@dataclass(slots=True)
class Process:
    """One process of a role, from its file of spans. Times are those of `Span`."""

    group: str
    incarnation: int
    role: str
    rank: str
    began: float
    ended: float | None = None
    """Time at which it wrote that it ends. None: it still runs, or was killed."""
    spans: SpanTable = field(default_factory=lambda: SpanTable.from_spans([]))
    stages: list[Stage] = field(default_factory=list)
    """Stages of its start that have ended."""

    @property
    def last(self) -> float:
        """End of its last span."""
        return max(self.began, float(self.spans.end.max(initial=-math.inf)))

    def workers(self) -> list[SpanTable]:
        """The spans of each of its lanes; at least one table. Spans without lane are in all
        tables."""
        lanes = self.spans.lanes
        if not lanes:
            return [self.spans]
        return [self.spans.in_lane(lane) for lane in lanes]


def read_spans(run_dir: Path) -> list[Span]:
    """All spans of logs/<group>/inc-*/spans-*.jsonl by start; see `read_processes`."""
    spans: list[Span] = []
    for process in read_processes(run_dir):
        spans += process.spans
    return sorted(spans, key=lambda span: span.start)


def read_processes(run_dir: Path, with_summary: bool = True) -> list[Process]:
    """All processes that wrote spans, by group, incarnation and name. Other files are left out.

    ``with_summary``: use the parsed spans in <run_dir>/summaries, see `base.block_summaries`. The
    result is the same without them.
    """
    if with_summary:
        return read_with_summary(partial(_read_processes, run_dir))
    return _read_processes(run_dir, False)


def _read_processes(run_dir: Path, with_summary: bool) -> list[Process]:
    offsets: dict[str, float] = {}
    paths = sorted(run_dir.glob(SPAN_FILES))
    root = run_dir if with_summary else None
    processes = [_read_process(path, offsets, root) for path in paths]
    return [process for process in processes if process]


def _read_process(path: Path, offsets: dict[str, float], root: Path | None) -> Process | None:
    """The process that wrote ``path``. None: the file has no complete first line.

    ``offsets``: wall time minus monotonic time, by the boot of a machine. ``root``: the run
    directory; None: without summaries.
    """
    match = _FILE.fullmatch("/".join(path.parts[-2:]))
    if not match or not path.is_file():
        return None
    incarnation, role, rank = match.groups()
    reader = _ProcessReader(Process(path.parts[-3], int(incarnation), role, rank, 0.0), offsets)
    for content in _contents(path, root):
        reader.add(content)
    return reader.result()


class _ProcessReader:
    """Builds a process from the blocks of its files."""

    def __init__(self, process: Process, offsets: dict[str, float]) -> None:
        self._process, self._offsets = process, offsets
        self._offset = 0.0
        self._has_begun = False
        self._tables = list[SpanTable]()

    def add(self, content: Mapping[str, Any]) -> None:
        """Add the lines of a block, see `_parse_block`."""
        table, at = _unpack_table(content), 0
        for position, line in content["lines"]:
            self._add_spans(table, at, position)
            at = position
            self._add_line(line)
        self._add_spans(table, at, len(table))

    def _add_spans(self, table: SpanTable, start: int, end: int) -> None:
        if self._has_begun and end > start:
            self._tables.append(table.part(start, end, self._offset))

    def _add_line(self, line: dict[str, Any]) -> None:
        """Add a line that is not only a span."""
        process = self._process
        if is_map(line, **_CLOCK) and line["role"] == process.role:
            clock_offset = line["wall"] - line["monotonic"]
            self._offset = self._offsets.setdefault(line["boot"], clock_offset)
            if not self._has_begun:
                began = line["monotonic"] if line.get("began") is None else line["began"]
                process.began = began + self._offset
                self._has_begun = True
        elif self._has_begun and is_map(line, ended=_TIME):
            process.ended = line["ended"] + self._offset
        elif self._has_begun and is_map(line, **_SPAN):
            self._add_spans(SpanTable.from_spans([_span(line)]), 0, 1)
        elif self._has_begun and is_map(line, **_STAGE):
            start, end = line["start"] + self._offset, line["end"] + self._offset
            process.stages.append(Stage(line["stage"], line["lane"], start, end))

    def result(self) -> Process | None:
        """The process; None: there was no line that relates its clock to wall time."""
        self._process.spans = SpanTable.join(self._tables)
        return self._process if self._has_begun else None


def _span(line: Mapping[str, Any]) -> Span:
    return Span(
        role=line["role"],
        what=line["what"],
        step=line["step"],
        start=line["start"],
        end=line["end"],
        peer=line.get("peer") or "",
        reason=line.get("reason") or "",
        lane=line.get("lane") or "",
    )


def _contents(path: Path, root: Path | None) -> Iterator[dict[str, Any]]:
    """Blocks of a file of spans and of its rotated files, see `_parse_block`."""
    for part in [*rotated_files(path), path]:
        summary = summary_of(root, part) if root else None
        with contextlib.suppress(OSError, EOFError, zlib.error):
            if part.suffix == ".gz":
                yield read_packed_file(part, summary, BLOCKS, read_lines_of_part)
            elif part.stat().st_size <= MAX_FILE_BYTES:
                yield from read_blocks(part, summary, BLOCKS)


def read_lines_of_part(part: Path) -> bytes:
    """Unpacked lines of a rotated file of spans, up to the first damage."""
    return b"".join(read_rotated_lines(part))


def _parse_block(data: bytes) -> dict[str, Any]:
    """Content of whole lines, for a summary: columns of spans, and all other lines with the number
    of spans before each."""
    spans, others = list[Span](), list[tuple[int, dict[str, Any]]]()
    for line in _lines(data):
        if not is_map(line, **_SPAN) or is_map(line, **_CLOCK) or is_map(line, ended=_TIME):
            others.append((len(spans), line))
        else:
            spans.append(_span(line))
    table = SpanTable.from_spans(spans)
    return {
        "kinds": [list(kind) for kind in table.kinds],
        "kind": table.kind.astype(_KIND).tobytes(),
        "step": table.step.tobytes(),
        "start": table.start.tobytes(),
        "end": table.end.tobytes(),
        "lines": others,
    }


def _unpack_table(content: Mapping[str, Any]) -> SpanTable:
    return SpanTable(
        [SpanKind(*kind) for kind in content["kinds"]],
        np.frombuffer(content["kind"], _KIND).astype(np.int64),
        np.frombuffer(content["step"], np.int64),
        np.frombuffer(content["start"], np.float64),
        np.frombuffer(content["end"], np.float64),
    )


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals with the same points, by start. Empty and reversed ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def union_length(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Seconds of [start, end] that at least one interval covers."""
    clipped = ((max(low, start), min(high, end)) for low, high in intervals)
    return sum(high - low for low, high in merge_intervals(clipped))


def _lines(data: bytes) -> Iterator[dict[str, Any]]:
    for text in read_lines(BytesIO(data)):
        with contextlib.suppress(ValueError):
            line = parse_json(text)
            if isinstance(line, dict) and all(map(_is_sound, line.values())):
                yield line


def _is_sound(value: object) -> bool:
    """Whether ``value`` is no number, or one that can be a measured time (not NaN or infinity)."""
    return not isinstance(value, int | float) or abs(value) < _LONGEST


BLOCKS = BlockFormat(1, _parse_block, cut_after_line)
"""Blocks of files of spans."""
