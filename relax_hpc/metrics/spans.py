"""Where the time of a run goes: every role writes spans, and a step is broken down over all of them."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from relax_hpc.metrics.writer import ends_torn

MODEL_KINDS = ("generate", "engine_update", "forward", "train")
"""Kinds in which a model or an engine computes."""
KINDS = (*MODEL_KINDS, "publish", "checkpoint", "wait", "eval", "queue", "weights")
"""All kinds; whoever adds one adds it here."""

_FLUSH_S = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Interval = tuple[float, float]


class Spans:
    """Accounts the time of one process, in a file and in totals since the last ``take``; safe to use from threads.

    Kinds are meant to follow, not to contain one another: a span inside another counts in both.

    >>> spans = Spans(log_dir / "spans-rollout-0.jsonl", "rollout")
    >>> with spans("generate", step=3):
    ...     responses = engine.generate(prompts)
    """

    def __init__(self, path: Path, role: str) -> None:
        """Append to `path`; its first line ties the monotonic clock of this boot of the machine to wall time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = ends_torn(path)
        self._file = path.open("a", encoding="utf-8")
        self._role = role
        self._lock = threading.Lock()
        self._totals: dict[str, float] = defaultdict(float)
        self._running: dict[object, tuple[str, float]] = {}
        self._begun: dict[object, float] = {}
        self._flushed = time.monotonic()
        anchor = {"role": role, "monotonic": time.monotonic(), "wall": time.time(), "boot": _boot()}
        self._file.write("\n" * torn + json.dumps(anchor) + "\n")
        self._file.flush()

    @contextmanager
    def __call__(self, what: str, step: int | None = None) -> Iterator[None]:
        """Account the time of the block to `what` (one of KINDS), also when it raises."""
        key, start = object(), time.monotonic()
        with self._lock:
            self._running[key] = (what, start)
            if what != "wait":
                self._begun[key] = start
            self._flush_if_due(start)
        try:
            yield
        finally:
            self._finish(key, step, start)

    def take(self) -> dict[str, float]:
        """Seconds of each kind since the last take, spans still running counted up to now."""
        now = time.monotonic()
        with self._lock:
            for key, (what, since) in self._running.items():
                self._totals[what] += max(0.0, now - since)
                self._running[key] = (what, max(now, since))
            totals, self._totals = dict(self._totals), defaultdict(float)
        return totals

    def busy(self) -> float:
        """Seconds that the longest piece of work has been going on; 0 while there is only waiting."""
        with self._lock:
            return max((time.monotonic() - start for start in self._begun.values()), default=0.0)

    def close(self) -> None:
        """Flush and close the file; a second call does nothing."""
        with self._lock:
            self._file.close()

    def _finish(self, key: object, step: int | None, start: float) -> None:
        end = time.monotonic()
        with self._lock:
            what, since = self._running.pop(key)
            self._begun.pop(key, None)
            self._totals[what] += max(0.0, end - since)
            if not self._file.closed:
                span = {"role": self._role, "what": what, "step": step, "start": start, "end": end}
                self._file.write(json.dumps(span) + "\n")
                self._flush_if_due(end)

    def _flush_if_due(self, now: float) -> None:
        # Also when a span starts: a long wait must not hold back what was measured before it.
        if now - self._flushed >= _FLUSH_S and not self._file.closed:
            self._file.flush()
            self._flushed = now


@dataclass(frozen=True, slots=True)
class Span:
    """What a role did in [start, end], wall-clock seconds that agree exactly between processes of one machine."""

    role: str
    what: str
    step: int | None
    start: float
    end: float


def read_spans(run_dir: Path) -> list[Span]:
    """All spans of logs/<group>/epoch-*/spans-*.jsonl by start; torn lines are left out."""
    offsets: dict[str, float] = {}
    spans: list[Span] = []
    for path in sorted(run_dir.glob("logs/*/epoch-*/spans-*.jsonl")):
        offset = 0.0
        for line in _lines(path):
            if "wall" in line:
                offset = offsets.setdefault(line["boot"], line["wall"] - line["monotonic"])
            else:
                start, end = line["start"] + offset, line["end"] + offset
                spans.append(Span(line["role"], line["what"], line["step"], start, end))
    return sorted(spans, key=lambda span: span.start)


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


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: `wall_s` seconds long, in `model_s` of which some model or engine computed."""

    step: int
    wall_s: float
    model_s: float
    seconds: dict[str, float]
    """Kind -> seconds of the step in which at least one role was at it."""

    @property
    def own_share(self) -> float:
        """Share of the step in which no model computed: what the system around them costs."""
        return 1.0 - self.model_s / self.wall_s


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Steps, and their medians."""

    steps: list[StepTime]
    wall_s: float
    own_share: float
    seconds: dict[str, float]


def step_breakdown(spans: Sequence[Span], first_step: int, last_step: int, boundary: str = "train") -> Breakdown:
    """Break down steps first_step to last_step, both included.

    A step lasts from the last end of a `boundary` span of the step before to that of its own; where a step was
    trained again after a failure, the time lost is part of it.

    Raises:
        ValueError: a step in first_step - 1 to last_step has no `boundary` span, or ends before the one before it.
    """
    ends: dict[int, float] = {}
    for span in spans:
        if span.what == boundary and span.step is not None:
            ends[span.step] = max(span.end, ends.get(span.step, span.end))
    if missing := [step for step in range(first_step - 1, last_step + 1) if step not in ends]:
        raise ValueError(
            f"spans: no {boundary!r} span for steps {missing[:5]}; choose steps after {min(ends, default=0)}"
        )
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        by_kind[span.what].append((span.start, span.end))
    merged = {kind: merge_intervals(intervals) for kind, intervals in sorted(by_kind.items())}
    steps = [_step_time(step, ends[step - 1], ends[step], merged) for step in range(first_step, last_step + 1)]
    seconds = {kind: median(step.seconds[kind] for step in steps) for kind in merged}
    return Breakdown(steps, median(s.wall_s for s in steps), median(s.own_share for s in steps), seconds)


def _step_time(step: int, start: float, end: float, merged: dict[str, list[Interval]]) -> StepTime:
    if end <= start:
        raise ValueError(f"spans: step {step} ended {start - end:.3f} s before step {step - 1} (trained again later?)")
    model = [interval for kind in MODEL_KINDS for interval in merged.get(kind, [])]
    seconds = {kind: union_length(intervals, start, end) for kind, intervals in merged.items()}
    return StepTime(step, end - start, union_length(model, start, end), seconds)


def _boot() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _lines(path: Path) -> Iterator[dict]:
    for text in path.read_bytes().splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            continue
