"""Spans of a process's work and waits: written to a file, and summed by kind."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.log_rotation import rotate_closed_file
from relax_hpc.base.metrics.accounting import Account, Label

MODEL_KINDS = ("generate", "engine_update", "forward", "train")
"""Kinds of work in which a model or an engine computes."""
KINDS = (*MODEL_KINDS, "publish", "checkpoint", "wait", "eval", "queue", "weights", "start")
"""All kinds. A new kind is added here and to `accounting.PRIORITY`."""
FOR = "_for_"
"""Infix of the kind of waits for one peer, such as `wait_for_rollout`."""

STARTING_PROCESS = "starting the process"
"""First stage of each start: the interpreter, and the meeting of the ranks."""
_FLUSH_S = 1.0
ROTATION_BYTES, _KEPT_PARTS = 16 << 20, 128
"""Bytes of a rotated file, and rotated files that are kept: 2 GiB of spans, a tenth of that
compressed."""
_ROUND_TRIP_S = 0.05
"""Seconds by which a wait may be longer than the time that the queue reports for it."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_start_time() -> float:
    """Start time of this process on the monotonic clock, accurate to 0.01 s."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that has not ended. For a wait, `set_causes` sets the peers and reasons."""

    what: str
    step: int | None
    lane: str
    cause: tuple[str, str]
    """Peer and reason of a wait, for the time without entry in `causes`."""
    begun: float
    start: float
    """Begin of the time that is not in the file yet."""
    causes: list[tuple[Label, float, float]] = field(default_factory=list)

    @property
    def label(self) -> Label:
        return Label(self.what, *self.cause)

    def set_causes(self, waited: Iterable[Sequence]) -> None:
        """Set the causes of a wait that ends now: consecutive (peer, reason, seconds).

        The time before them has the cause `cause`.
        """
        end = time.monotonic()
        low = self.causes[-1][2] if self.causes else self.start
        causes = []
        for peer, reason, seconds in reversed(list(waited)):
            start = max(low, end - seconds)
            if start < end:
                causes.append((Label(self.what, peer, reason), start, end))
            end = start
        self.causes += reversed(causes)

    def pieces(self, now: float) -> list[tuple[Label, float, float]]:
        """Pieces of the span since `start`, without gaps."""
        pieces: list[tuple[Label, float, float]] = []
        at = self.start
        for label, start, end in self.causes:
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
    """Records the time of one process: in a file, and as totals since the last `take`. Thread-safe.

    A process may have several lanes, such as one for each engine. Each lane has its account. If
    spans of a lane overlap, the totals count each second once, see `accounting.PRIORITY`.

    ::

        spans = Spans(log_dir / "spans-rollout-0.jsonl", "rollout")
        with spans("generate", step=3):
            responses = engine.generate(prompts)
        with spans("wait", cause=("actor", "a newer version")):
            news = next_version.result()
    """

    def __init__(self, path: Path, role: str, began: float | None = None) -> None:
        """Append to `path`. Its first line relates the monotonic clock of this boot to wall time.

        ``began``: start time of the process. The time from then to the first span of a lane is of
        kind `start`.
        """
        self._path, self._role = path, role
        self._lock = threading.Lock()
        self._open: dict[int, OpenSpan] = {}
        self._stages: dict[str, tuple[str, float]] = {}
        """Lane -> present stage of its start, and the begin of the stage."""
        self._accounts: dict[str, Account] = {}
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Called with the kind of each span, whose block it surrounds: names spans in a trace."""
        now = self._flushed = time.monotonic()
        self._began = now if began is None else began
        self._starts = began is not None
        self._begin_file()
        if self._starts:
            self._stages[""] = (STARTING_PROCESS, self._began)

    @contextmanager
    def __call__(
        self, what: str, step: int | None = None, lane: str = "", cause: tuple[str, str] = ("", "")
    ) -> Iterator[OpenSpan]:
        """Record the time of the block as kind ``what`` (one of KINDS), also if the block raises.

        ``cause``: peer and reason of a wait, for the time without entry in `OpenSpan.causes`.
        """
        now = time.monotonic()
        span = OpenSpan(what, step, lane, cause, now, now)
        with self._lock:
            self._account(lane, now).begin(span.label, now)
            self._open[id(span)] = span
            self._flush_if_due(now)
        try:
            with self.annotate(what):
                yield span
        finally:
            self._finish(span)

    def enter_stage(self, stage: str, lane: str = "") -> None:
        """Record that the start of ``lane`` is in ``stage`` from now on; empty: it has ended.

        Stages say where the time of a start goes, see `start_stages`. They are no spans: the time
        of a start is of kind `start`.
        """
        now = time.monotonic()
        with self._lock:
            previous, since = self._stages.get(lane, ("", now))
            if previous == stage or self._file.closed:
                return
            if previous:
                texts = {"stage": previous, "lane": lane}
                times = {"start": since, "end": now}
                self._write({"role": self._role, **texts, **times})
            self._stages[lane] = (stage, now)
            self._flush_if_due(now)

    def take(self) -> dict[str, float]:
        """Seconds of each kind since the last call. Their sum in each lane is the time that has
        passed.

        Open spans count up to now. A wait with a known peer is of kind `wait_for_<peer>`. Long open
        spans are also written up to now, so that little is lost if the process is killed.
        """
        now = time.monotonic()
        totals: dict[str, float] = defaultdict(float)
        with self._lock:
            for span in self._open.values():
                if now - span.start >= _FLUSH_S:
                    self._write_pieces(span, now)
                    span.start, span.causes = now, []
            for account in self._accounts.values():
                for label, seconds in account.take(now).items():
                    kind = f"{label.what}{FOR}{label.peer}" if label.peer else label.what
                    totals[kind] += seconds
        return dict(totals)

    def longest_work_s(self) -> float:
        """Seconds since the begin of the oldest open span of work; 0: all open spans are waits."""
        with self._lock:
            begun = [span.begun for span in self._open.values() if span.what != "wait"]
        return max((time.monotonic() - start for start in begun), default=0.0)

    def is_starting(self) -> bool:
        """Whether the process has not begun its first span."""
        with self._lock:
            return not self._accounts

    def close(self) -> None:
        """Write that the process ends cleanly, and close the file. Safe to call twice."""
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
            if span.causes:
                account.move(span.label, _lengths(span.pieces(end)))
            self._write_pieces(span, end)
            self._flush_if_due(end)

    def _write_pieces(self, span: OpenSpan, end: float) -> None:
        for label, start, until in span.pieces(end):
            line = {
                "role": self._role,
                "what": span.what,
                "step": span.step,
                "start": start,
                "end": until,
            }
            texts = {"lane": span.lane, "peer": label.peer, "reason": label.reason}
            self._write(line | {name: text for name, text in texts.items() if text})

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")

    def _begin_file(self) -> None:
        """Open the file and write the line that relates its clock to wall time."""
        self._file = AppendFile(self._path)
        now, wall = time.monotonic(), time.time()
        self._write(
            {
                "role": self._role,
                "monotonic": now,
                "wall": wall,
                "boot": _boot(),
                "began": self._began,
            }
        )
        self._file.flush()

    def _flush_if_due(self, now: float) -> None:
        # Also called when a span begins, so that a long wait does not delay the previous spans.
        if now - self._flushed >= _FLUSH_S and not self._file.closed:
            self._file.flush()
            self._flushed = now
            if self._file.is_written and os.fstat(self._file.fileno()).st_size > ROTATION_BYTES:
                self._file.close()
                rotate_closed_file(self._path, _KEPT_PARTS)
                self._begin_file()


def _boot() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _lengths(pieces: Iterable[tuple[Label, float, float]]) -> dict[Label, float]:
    lengths: dict[Label, float] = defaultdict(float)
    for label, start, end in pieces:
        lengths[label] += end - start
    return lengths
