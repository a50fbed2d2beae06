"""Reads the spans of a run from its files."""

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
class Span:
    """Span of a role's time in [start, end], in wall-clock seconds.

    The clocks of processes of one machine agree exactly.
    """

    role: str
    what: str
    step: int | None
    start: float
    end: float
    peer: str = ""
    """Role or other cause of a wait."""
    reason: str = ""
    lane: str = ""


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
    spans: list[Span] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    """Stages of its start that have ended."""

    @property
    def last(self) -> float:
        """End of its last span."""
        return max([self.began, *(span.end for span in self.spans)])

    def workers(self) -> list[list[Span]]:
        """The spans of each of its lanes; at least one list. Spans without lane are in all
        lists."""
        lanes = sorted({span.lane for span in self.spans} - {""})
        if not lanes:
            return [self.spans]
        return [self._spans_of_lane(lane) for lane in lanes]

    def _spans_of_lane(self, lane: str) -> list[Span]:
        return [span for span in self.spans if span.lane in (lane, "")]


def read_spans(run_dir: Path) -> list[Span]:
    """All spans of logs/<group>/inc-*/spans-*.jsonl by start; see `read_processes`."""
    spans: list[Span] = []
    for process in read_processes(run_dir):
        spans += process.spans
    return sorted(spans, key=lambda span: span.start)


def read_processes(run_dir: Path) -> list[Process]:
    """All processes that wrote spans, by group, incarnation and name. Other files are left out."""
    offsets: dict[str, float] = {}
    paths = sorted(run_dir.glob("logs/*/inc-*/spans-*.jsonl"))
    processes = [_read_process(path, offsets) for path in paths]
    return [process for process in processes if process]


def _read_process(path: Path, offsets: dict[str, float]) -> Process | None:
    """The process that wrote ``path``. None: the file has no complete first line.

    ``offsets``: wall time minus monotonic time, by the boot of a machine.
    """
    process, offset = None, 0.0
    match = _FILE.fullmatch("/".join(path.parts[-2:]))
    if not match or not path.is_file():
        return None
    incarnation, role, rank = match.groups()
    for line in _lines(path):
        if is_map(line, **_CLOCK) and line["role"] == role:
            offset = offsets.setdefault(line["boot"], line["wall"] - line["monotonic"])
            if process is None:
                began = line["monotonic"] if line.get("began") is None else line["began"]
                process = Process(path.parts[-3], int(incarnation), role, rank, began + offset)
        elif process and is_map(line, ended=_TIME):
            process.ended = line["ended"] + offset
        elif process and is_map(line, **_SPAN):
            process.spans.append(_span(line, offset))
        elif process and is_map(line, **_STAGE):
            start, end = line["start"] + offset, line["end"] + offset
            process.stages.append(Stage(line["stage"], line["lane"], start, end))
    return process


def _span(line: dict, offset: float) -> Span:
    return Span(
        role=line["role"],
        what=line["what"],
        step=line["step"],
        start=line["start"] + offset,
        end=line["end"] + offset,
        peer=line.get("peer") or "",
        reason=line.get("reason") or "",
        lane=line.get("lane") or "",
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


def _lines(path: Path) -> Iterator[dict]:
    with contextlib.suppress(OSError):
        for text in read_all_lines(path):
            with contextlib.suppress(ValueError):
                line = parse_json(text)
                if isinstance(line, dict) and all(map(_is_sound, line.values())):
                    yield line


def _is_sound(value: object) -> bool:
    """Whether ``value`` is no number, or one that can be a measured time (not NaN or infinity)."""
    return not isinstance(value, int | float) or abs(value) < _LONGEST
