"""Reads metrics.jsonl. Each step of the surviving lineage becomes one merged row."""

from __future__ import annotations

import contextlib
import errno
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from relax_hpc.base.block_summaries import (
    BlockFormat,
    cut_after_line,
    read_blocks,
    read_with_summary,
    summary_of,
)
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import ForeignFileError, parse_json, read_lines
from relax_hpc.base.metrics.writer import METRICS_FILE, RESERVED

_FILE_BYTES = 1 << 30
"""Bytes of a file of metrics, at most. A file of 100,000 steps has half as many."""
_BLOCK_BYTES = 1 << 20
_LARGEST = 2**53
"""Bound of steps and incarnations: larger integers have no exact float."""


@dataclass(kw_only=True, slots=True)
class Metrics:
    """Content of metrics.jsonl."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows by ascending step: {"step": int, "time": s, "incarnation": int, tag: float, ...}; a null
    is nan."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """All lines of steps, superseded ones too, in the order of the file."""
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    """(incarnation, step) of each return to an earlier step, in the order of the file."""
    rollback_times: list[float] = field(default_factory=list)
    """Wall-clock seconds of each entry of `rollbacks`."""
    torn: int = 0
    """Number of incomplete lines, which are left out. Their writer was killed."""


def is_step(row: Mapping[str, Any]) -> bool:
    """Whether a row or a line belongs to a training step. Others have only evaluations."""
    return "reward/mean" in row or "perf/step_s" in row


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run by ascending step, see `Metrics.rows`. Empty: there is no file yet."""
    return load_metrics(run_dir).rows


def load_metrics(run_dir: Path, with_summary: bool = True) -> Metrics:
    """Read and merge <run_dir>/metrics.jsonl.

    ``with_summary``: use the parsed lines in <run_dir>/summaries, see `base.block_summaries`. The
    result is the same without them.

    A rollback to step r removes lines of steps >= r of older incarnations, and earlier lines of its
    own incarnation. A late line of an older incarnation is removed too. Evaluations of step r stay,
    because they are of the weights that training resumed from. Of the remaining lines of a step the
    newest incarnation wins, tag by tag. ConfigError: the file is not a regular file of a run, or is
    too large.
    """
    if with_summary:
        return read_with_summary(partial(_load_metrics, run_dir))
    return _load_metrics(run_dir, False)


def _load_metrics(run_dir: Path, with_summary: bool) -> Metrics:
    path = run_dir / METRICS_FILE
    if not path.exists():
        return Metrics()
    try:
        lines, torn = _read_lines(path, summary_of(run_dir, path) if with_summary else None)
    except ForeignFileError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    metrics = merge_lines(lines)
    metrics.torn = torn
    return metrics


def merge_lines(lines: list[dict[str, Any]]) -> Metrics:
    """Merge the lines of a file of metrics, or of its beginning, as `load_metrics` describes."""
    cuts = [
        (line["incarnation"], number, line["step"])
        for number, line in enumerate(lines)
        if "event" in line
    ]
    merged: dict[int, dict[str, Any]] = {}
    numbered = sorted(enumerate(lines), key=lambda item: (item[1]["incarnation"], item[0]))
    for number, line in numbered:
        if "event" in line:
            continue
        if kept := _surviving(line, number, cuts):
            merged.setdefault(line["step"], {}).update(kept)
    rollbacks = [(incarnation, step) for incarnation, _, step in cuts]
    written = [line for line in lines if "event" not in line]
    rows = [merged[step] for step in sorted(merged)]
    times = [line["time"] for line in lines if "event" in line]
    return Metrics(rows=rows, lines=written, rollbacks=rollbacks, rollback_times=times)


def tags_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Sorted tags that occur in rows."""
    return sorted(set().union(*rows) - RESERVED)


def _surviving(
    line: dict[str, Any], number: int, cuts: list[tuple[int, int, int]]
) -> dict[str, Any] | None:
    """Values of a line that no rollback has superseded: all, its evaluations, or None.

    ``number``: number of the line in the file. ``cuts``: (incarnation, number of the line, step) of
    each rollback.
    """
    position = (line["incarnation"], number)
    later = [step for incarnation, at, step in cuts if (incarnation, at) > position]
    cut = min(later, default=math.inf)
    if line["step"] < cut:
        return line
    if line["step"] > cut:
        return None
    kept = {key: value for key, value in line.items() if key in RESERVED or key.startswith("eval/")}
    return kept if kept.keys() - RESERVED else None


def _read_lines(path: Path, summary: Path | None) -> tuple[list[dict[str, Any]], int]:
    """Lines of a file of metrics, see `parse_lines`. ForeignFileError: it is not read."""
    if (size := path.stat().st_size) > _FILE_BYTES:
        raise ForeignFileError(
            errno.EFBIG, f"found {size} bytes, allowed for metrics: {_FILE_BYTES}", str(path)
        )
    lines, torn = list[dict[str, Any]](), 0
    for content in read_blocks(path, summary, BLOCKS):
        torn += content["torn"]
        for run in content["runs"]:
            lines += _unpack_run(run)
    return lines, torn


def _parse_block(data: bytes) -> dict[str, Any]:
    """Content of whole lines, for a summary: the number of incomplete lines, and runs of lines
    with the same keys."""
    lines, torn = parse_lines(read_lines(BytesIO(data)))
    runs = list[dict[str, Any]]()
    for line in lines:
        keys, values = list(line), list(line.values())
        # A line of an event has a text.
        has_numbers = all(type(value) in (int, float) for value in values)
        form = "d" if has_numbers else ""
        if not runs or (runs[-1]["keys"], runs[-1]["form"]) != (keys, form):
            runs.append({"keys": keys, "form": form, "values": array("d") if form else []})
        runs[-1]["values"].extend(values)
    for run in runs:
        if run["form"]:
            run["values"] = run["values"].tobytes()
    return {"torn": torn, "runs": runs}


def _unpack_run(run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Lines of a run of `_parse_block`."""
    keys, values = run["keys"], run["values"]
    if run["form"]:
        values = array(run["form"], values).tolist()
    for start in range(0, len(values), len(keys)):
        line = dict(zip(keys, values[start : start + len(keys)], strict=True))
        # All numbers of a run are floats. These are integers that a float represents exactly.
        line["step"], line["incarnation"] = int(line["step"]), int(line["incarnation"])
        yield line


def count_lines(path: Path, end: int) -> int:
    """Number of lines that end before byte ``end`` of a file; 0 if there is no file."""
    count = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while end > 0 and (block := file.read(min(end, _BLOCK_BYTES))):
            count += block.count(b"\n")
            end -= len(block)
    return count


def parse_lines(texts: Iterable[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Complete lines, with nan for each null, and the number of incomplete lines."""
    lines, torn = [], 0
    for text in texts:
        if not text.strip():
            continue
        try:
            line = parse_json(text)
            step, incarnation = int(line["step"]), int(line["incarnation"])
            time = float(line["time"])
        except (ValueError, KeyError, TypeError, OverflowError):
            torn += 1
            continue
        if max(abs(step), abs(incarnation)) > _LARGEST or not math.isfinite(time):
            torn += 1
            continue
        values = {
            key: _number(value)
            for key, value in line.items()
            if _is_number(value) or key in RESERVED
        }
        lines.append(values | {"step": step, "incarnation": incarnation, "time": time})
    return lines, torn


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _number(value: Any) -> Any:
    """``value``; nan for None, and for a number that no finite float can represent."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        return value
    try:
        return value if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


BLOCKS = BlockFormat(1, _parse_block, cut_after_line)
"""Blocks of metrics.jsonl."""
