"""Spans of a run, read from its files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from relax_hpc.base.foreign_files import parse_json
from relax_hpc.base.log_rotation import read_all_lines
from relax_hpc.base.metrics.accounting import Interval
from relax_hpc.base.rundir import is_map

_FILE = re.compile(r"inc-(\d{6})/spans-(\w+)-(\d+)\.jsonl", re.ASCII)
_TEXT, _TIME = (str, type(None)), (int, float)
_CLOCK = {
    "role": str,
    "boot": str,
    "wall": _TIME,
    "monotonic": _TIME,
    "began": (*_TIME, type(None)),
}
_SPAN = {"role": str, "what": str, "step": (int, type(None)), "start": _TIME, "end": _TIME}
_SPAN |= {"peer": _TEXT, "reason": _TEXT, "lane": _TEXT}
_LONGEST = 1e12
"""Seconds from now beyond which a time was not measured."""


@dataclass(frozen=True, slots=True)
class Span:
    """Span of a role's time in [start, end], wall-clock seconds that agree exactly between
    processes of one machine."""

    role: str
    what: str
    step: int | None
    start: float
    end: float
    peer: str = ""
    """Role, or what else, that a wait was for."""
    reason: str = ""
    lane: str = ""


@dataclass(slots=True)
class Process:
    """One process of a role, as its file tells; times as those of its spans."""

    group: str
    incarnation: int
    role: str
    rank: str
    began: float
    ended: float | None = None
    """Time of its end by its own word; None: it goes on, or had no time to say so."""
    spans: list[Span] = field(default_factory=list)

    @property
    def last(self) -> float:
        """Time until which its spans are known."""
        return max([self.began, *(span.end for span in self.spans)])

    def workers(self) -> list[list[Span]]:
        """The spans of each of its lanes; at least one list."""
        lanes = sorted({span.lane for span in self.spans} - {""})
        return [[s for s in self.spans if s.lane in (lane, "")] for lane in lanes] or [self.spans]


def read_spans(run_dir: Path) -> list[Span]:
    """All spans of logs/<group>/inc-*/spans-*.jsonl by start; see `read_processes`."""
    spans = (span for process in read_processes(run_dir) for span in process.spans)
    return sorted(spans, key=lambda span: span.start)


def read_processes(run_dir: Path) -> list[Process]:
    """All processes that wrote spans, by group, incarnation and name; what is none of ours is left
    out."""
    offsets: dict[str, float] = {}
    paths = sorted(run_dir.glob("logs/*/inc-*/spans-*.jsonl"))
    found = (_read_process(path, offsets) for path in paths)
    return [process for process in found if process]


def _read_process(path: Path, offsets: dict[str, float]) -> Process | None:
    """None without a whole line that ties its clock. ``offsets`` of wall time, by boot of a
    machine."""
    process, offset = None, 0.0
    named = _FILE.fullmatch("/".join(path.parts[-2:]))
    for line in _lines(path) if named and path.is_file() else ():
        if named and is_map(line, **_CLOCK) and line["role"] == named[2]:
            offset = offsets.setdefault(line["boot"], line["wall"] - line["monotonic"])
            if process is None:
                began = line["monotonic"] if line.get("began") is None else line["began"]
                process = Process(
                    path.parts[-3], int(named[1]), line["role"], named[3], began + offset
                )
        elif process and is_map(line, ended=_TIME):
            process.ended = line["ended"] + offset
        elif process and is_map(line, **_SPAN):
            process.spans.append(_span(line, offset))
    return process


def _span(line: dict, offset: float) -> Span:
    about = (line.get(name) or "" for name in ("peer", "reason", "lane"))
    return Span(
        line["role"],
        line["what"],
        line["step"],
        line["start"] + offset,
        line["end"] + offset,
        *about,
    )


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals by start; empty and reversed ones are left out."""
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


def _lines(path: Path) -> Iterator[dict]:
    with contextlib.suppress(OSError):
        for text in read_all_lines(path):
            with contextlib.suppress(ValueError):
                line = parse_json(text)
                if isinstance(line, dict) and all(map(_is_sound, line.values())):
                    yield line


def _is_sound(value: object) -> bool:
    """Whether it is no number that nobody measured: NaN, infinity, a year beyond all calendars."""
    return not isinstance(value, int | float) or abs(value) < _LONGEST
