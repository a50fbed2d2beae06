"""Where the time of a run goes: every role writes spans, and a step is broken down over all of them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from relax_hpc.metrics.accounting import Account, Interval, Label
from relax_hpc.metrics.writer import ends_torn

MODEL_KINDS = ("generate", "engine_update", "forward", "train")
"""Kinds in which a model or an engine computes."""
KINDS = (*MODEL_KINDS, "publish", "checkpoint", "wait", "eval", "queue", "weights", "start")
"""All kinds; whoever adds one adds it here, and to `accounting.PRIORITY`."""
FOR = "_for_"
"""`wait_for_rollout`: seconds of waiting by peer."""

_FLUSH_S = 1.0
_ROUND_TRIP_S = 0.05
"""What a wait may be longer than the queue says it was."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_began() -> float:
    """When this process was started, of the monotonic clock, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that goes on. Of a wait, ``because`` says what it was for."""

    what: str
    step: int | None
    lane: str
    cause: tuple[str, str]
    """Peer and reason of a wait, of what nothing better is known of."""
    begun: float
    start: float
    """Since when it is not in the file yet."""
    parts: list[tuple[Label, float, float]] = field(default_factory=list)

    @property
    def label(self) -> Label:
        return Label(self.what, *self.cause)

    def because(self, waited: Iterable[Sequence]) -> None:
        """The wait ends now, and was for these (peer, reason, seconds) one after the other; before them for `cause`."""
        end = time.monotonic()
        low = self.parts[-1][2] if self.parts else self.start
        found = []
        for peer, reason, seconds in reversed(list(waited)):
            start = max(low, end - seconds)
            if start < end:
                found.append((Label(self.what, peer, reason), start, end))
            end = start
        self.parts += reversed(found)

    def pieces(self, now: float) -> list[tuple[Label, float, float]]:
        """What there is of it since `start`, without gaps."""
        pieces: list[tuple[Label, float, float]] = []
        at = self.start
        for label, start, end in self.parts:
            if start - at > _ROUND_TRIP_S:
                pieces.append((self.label, at, start))
                at = start
            pieces.append((label, at, end))
            at = end
        if not pieces or now - at > _ROUND_TRIP_S:
            return [*pieces, (self.label, at, now)]
        label, start, _ = pieces.pop()
        return [*pieces, (label, start, now)]


class Spans:
    """Accounts the time of one process, in a file and in totals since the last ``take``; safe to use from threads.

    A process may have several lanes, such as one an engine, each with an account of its own. Where spans of a lane
    overlap, totals have each second once (`accounting.PRIORITY`).

    >>> spans = Spans(log_dir / "spans-rollout-0.jsonl", "rollout")
    >>> with spans("generate", step=3):
    ...     responses = engine.generate(prompts)
    >>> with spans("wait", cause=("actor", "a newer version")):
    ...     news = next_version.result()
    """

    def __init__(self, path: Path, role: str, began: float | None = None) -> None:
        """Append to `path`; its first line ties the monotonic clock of this boot of the machine to wall time.

        ``began``: when the process was; from then to the first span of each lane is its `start`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = ends_torn(path)
        self._file = path.open("a", encoding="utf-8")
        self._role = role
        self._lock = threading.Lock()
        self._open: dict[int, OpenSpan] = {}
        self._accounts: dict[str, Account] = {}
        now = self._flushed = time.monotonic()
        self._began = now if began is None else began
        anchor = {"role": role, "monotonic": now, "wall": time.time(), "boot": _boot(), "began": self._began}
        self._file.write("\n" * torn)
        self._write(anchor)
        self._file.flush()
        self._starts = began is not None

    @contextmanager
    def __call__(
        self, what: str, step: int | None = None, lane: str = "", cause: tuple[str, str] = ("", "")
    ) -> Iterator[OpenSpan]:
        """Account the time of the block to `what` (one of KINDS), also when it raises.

        ``cause``: of a wait the peer and the reason, unless the span is told others.
        """
        now = time.monotonic()
        span = OpenSpan(what, step, lane, cause, now, now)
        with self._lock:
            self._account(lane, now).begin(span.label, now)
            self._open[id(span)] = span
            self._flush_if_due(now)
        try:
            yield span
        finally:
            self._finish(span)

    def take(self) -> dict[str, float]:
        """Seconds of each kind since the last take, spans still running counted up to now; they add up to the time
        that has passed, in each lane. A wait for a peer that is known is `wait_for_<peer>`.

        Those that run for long are written up to now too, so that little is lost with the process.
        """
        now = time.monotonic()
        totals: dict[str, float] = defaultdict(float)
        with self._lock:
            for span in self._open.values():
                if now - span.start >= _FLUSH_S:
                    self._write_pieces(span, now)
                    span.start, span.parts = now, []
            for account in self._accounts.values():
                for label, seconds in account.take(now).items():
                    totals[f"{label.what}{FOR}{label.peer}" if label.peer else label.what] += seconds
        return dict(totals)

    def busy(self) -> float:
        """Seconds that the longest piece of work has been going on; 0 while there is only waiting."""
        with self._lock:
            begun = [span.begun for span in self._open.values() if span.what != "wait"]
        return max((time.monotonic() - start for start in begun), default=0.0)

    def close(self) -> None:
        """Write that the process ends in good order, and close the file; a second call does nothing."""
        with self._lock:
            self._write({"ended": time.monotonic()})
            self._file.close()

    def _account(self, lane: str, now: float) -> Account:
        if lane not in self._accounts:
            account = self._accounts[lane] = Account(self._began)
            if self._starts:
                span = OpenSpan("start", None, lane, ("", ""), self._began, self._began)
                account.begin(span.label, self._began)
                account.end(span.label, now)
                self._write_pieces(span, now)
        return self._accounts[lane]

    def _finish(self, span: OpenSpan) -> None:
        end = time.monotonic()
        with self._lock:
            del self._open[id(span)]
            account = self._accounts[span.lane]
            account.end(span.label, end)
            if span.parts:
                account.move(span.label, _lengths(span.pieces(end)))
            self._write_pieces(span, end)
            self._flush_if_due(end)

    def _write_pieces(self, span: OpenSpan, end: float) -> None:
        for label, start, until in span.pieces(end):
            line = {"role": self._role, "what": span.what, "step": span.step, "start": start, "end": until}
            about = {"lane": span.lane, "peer": label.peer, "reason": label.reason}
            self._write(line | {name: value for name, value in about.items() if value})

    def _write(self, line: dict[str, object]) -> None:
        if not self._file.closed:
            self._file.write(json.dumps(line) + "\n")

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
    peer: str = ""
    """Of a wait: the role, or what else, that it was for."""
    reason: str = ""
    lane: str = ""


@dataclass(slots=True)
class Process:
    """One process of a role, as its file tells; times as those of its spans."""

    group: str
    epoch: int
    role: str
    rank: str
    began: float
    ended: float | None = None
    """By its own word; None: it goes on, or had no time to say so."""
    spans: list[Span] = field(default_factory=list)

    @property
    def last(self) -> float:
        """Until when its spans are known."""
        return max([self.began, *(span.end for span in self.spans)])

    def workers(self) -> list[list[Span]]:
        """The spans of each of its lanes; at least one list."""
        lanes = sorted({span.lane for span in self.spans} - {""})
        return [[s for s in self.spans if s.lane in (lane, "")] for lane in lanes] or [self.spans]


def read_spans(run_dir: Path) -> list[Span]:
    """All spans of logs/<group>/epoch-*/spans-*.jsonl by start; torn lines are left out."""
    spans = (span for process in read_processes(run_dir) for span in process.spans)
    return sorted(spans, key=lambda span: span.start)


def read_processes(run_dir: Path) -> list[Process]:
    """All processes that wrote spans, by group, epoch and name; torn lines are left out."""
    offsets: dict[str, float] = {}
    found = (_read_process(path, offsets) for path in sorted(run_dir.glob("logs/*/epoch-*/spans-*.jsonl")))
    return [process for process in found if process]


def _read_process(path: Path, offsets: dict[str, float]) -> Process | None:
    """None without a whole line that ties its clock. ``offsets`` of wall time, by boot of a machine."""
    process, offset = None, 0.0
    for line in _lines(path):
        if "wall" in line:
            offset = offsets.setdefault(line["boot"], line["wall"] - line["monotonic"])
            if process is None:
                began, (group, epoch) = line.get("began", line["monotonic"]), path.parts[-3:-1]
                rank = path.stem.rpartition("-")[2]
                process = Process(group, int(epoch.rpartition("-")[2]), line["role"], rank, began + offset)
        elif process and "ended" in line:
            process.ended = line["ended"] + offset
        elif process:
            process.spans.append(_span(line, offset))
    return process


def _span(line: dict, offset: float) -> Span:
    about = (line.get(name, "") for name in ("peer", "reason", "lane"))
    return Span(line["role"], line["what"], line["step"], line["start"] + offset, line["end"] + offset, *about)


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
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict):
                yield line


def _lengths(pieces: Iterable[tuple[Label, float, float]]) -> dict[Label, float]:
    lengths: dict[Label, float] = defaultdict(float)
    for label, start, end in pieces:
        lengths[label] += end - start
    return lengths
