"""Reads metrics.jsonl: one merged row a step, of the lineage that survived."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_hpc.metrics.writer import METRICS_FILE, RESERVED


@dataclass(kw_only=True, slots=True)
class Metrics:
    """Content of metrics.jsonl."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows by ascending step: {"step": int, "time": s, "incarnation": int, tag: float, ...}; a null is nan."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Lines of all steps that were ever written, in the order of the file."""
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    """(incarnation, step) of each return to an earlier step, in the order of the file."""
    torn: int = 0
    """Lines left out because they are not whole (their writer was killed)."""


def is_step(row: Mapping[str, Any]) -> bool:
    """Whether a row, or a line, has what a training step reports; others are of evaluations alone."""
    return "reward/mean" in row or "perf/step_s" in row


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run by ascending step (see `Metrics.rows`); empty when there is no file yet."""
    return load_metrics(run_dir).rows


def load_metrics(run_dir: Path) -> Metrics:
    """Read and merge <run_dir>/metrics.jsonl.

    A line of step s vanishes when a rollback to a step <= s stands in a newer incarnation, or after it in its own; a
    straggler of an older one cannot come back. Evaluations at the very step of the rollback stay: they are of the
    weights that training resumed from. Of the remaining lines of a step the newest incarnation wins, tag by tag.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return Metrics()
    lines, torn = _parse(path.read_bytes().splitlines())
    cuts = [(line["incarnation"], place, line["step"]) for place, line in enumerate(lines) if "event" in line]
    merged: dict[int, dict[str, Any]] = {}
    for place, line in sorted(enumerate(lines), key=lambda item: (item[1]["incarnation"], item[0])):
        if "event" not in line and (kept := _surviving(line, place, cuts)):
            merged.setdefault(line["step"], {}).update(kept)
    rollbacks = [(incarnation, step) for incarnation, _, step in cuts]
    written = [line for line in lines if "event" not in line]
    return Metrics(rows=[merged[step] for step in sorted(merged)], lines=written, rollbacks=rollbacks, torn=torn)


def tags_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Sorted tags that occur in rows."""
    return sorted({key for row in rows for key in row} - RESERVED)


def _surviving(line: dict[str, Any], place: int, cuts: list[tuple[int, int, int]]) -> dict[str, Any] | None:
    """Part of a line that no rollback has superseded: all of it, its evaluations, or None."""
    later = [step for incarnation, at, step in cuts if (incarnation, at) > (line["incarnation"], place)]
    cut = min(later, default=math.inf)
    if line["step"] < cut:
        return line
    if line["step"] > cut:
        return None
    kept = {key: value for key, value in line.items() if key in RESERVED or key.startswith("eval/")}
    return kept if kept.keys() - RESERVED else None


def _parse(texts: Iterable[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Whole lines, nulls turned into nan, and the number of broken ones."""
    lines, torn = [], 0
    for text in filter(None, texts):
        try:
            line = json.loads(text)
            step, incarnation, time = int(line["step"]), int(line["incarnation"]), float(line["time"])
        except (ValueError, KeyError, TypeError):
            torn += 1
            continue
        values = {key: math.nan if value is None else value for key, value in line.items()}
        lines.append(values | {"step": step, "incarnation": incarnation, "time": time})
    return lines, torn
