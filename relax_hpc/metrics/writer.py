"""The metrics of a run, written by the hub alone: one JSON line a step, and the same scalars for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import socket
import time as clock
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from relax_hpc.disk import Lines
from relax_hpc.metrics.tags import in_tensorboard

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

GENERATED, GENERATED_SUM = "reward/generated", "reward/generated_sum"
"""Samples that were drawn and given a reward since the last step, kept or not, and the sum of it: rollouts report
both, and the hub makes `reward/mean_generated` of them."""

COMPONENT_SUM, COMPONENT_COUNT = "reward/component_sum/", "reward/component_count/"
"""Prefixes of the name of a component of the reward: its sum over samples, and over how many. The hub makes
`reward/component_<name>` of them."""

READ, CACHED = "perf/read_tokens", "perf/cached_tokens"
"""Tokens that engines were asked with since the last step, and those of them whose keys and values they had: the hub
makes `perf/cached_share` of both."""

SKIPPED = "queue/samples_skipped"

RESERVED = frozenset({"step", "time", "incarnation", "event"})
METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"


class MetricsWriter:
    """Appends to <run_dir>/metrics.jsonl and to one event file an incarnation in <run_dir>/tensorboard.

    Nothing that was written is ever changed: after a resume, ``rolled_back`` says which steps no longer count and
    `relax_hpc.metrics.read` leaves them out.

    >>> with MetricsWriter(run_dir, incarnation=1) as metrics:
    ...     metrics.write(0, {"reward/mean": 0.25})
    """

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        """Open for appending, making directories as needed; `incarnation` is the incarnation that writes."""
        self.incarnation = incarnation
        self._file = Lines(run_dir / METRICS_FILE)
        self._events = _EventFile(run_dir / TENSORBOARD_DIR, incarnation)

    def write(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Record the scalars of a step; several lines of one step add up, and of one tag the later value counts.

        Args:
            step: the training step, from 0. What is measured on version v belongs to step v.
            values: tag -> anything float() takes; NaN and infinities become null in the JSON line.
            time: wall-clock seconds since 1970; now if left out.

        Raises:
            ValueError: a tag has the name of one of the line's own fields.
        """
        if taken := RESERVED.intersection(values):
            raise ValueError(f"metrics: {sorted(taken)} are fields of the line itself; use a tag such as perf/time_s")
        time = clock.time() if time is None else time
        scalars = {tag: float(value) for tag, value in values.items()}
        finite = {tag: value if math.isfinite(value) else None for tag, value in scalars.items()}
        self._append({"step": step, "time": time, "incarnation": self.incarnation, **finite})
        self._events.write(_summary(step, time, scalars))

    def rolled_back(self, step: int) -> None:
        """Training goes on at `step`: what was written before for this and later steps no longer counts."""
        now = clock.time()
        self._append({"step": step, "time": now, "incarnation": self.incarnation, "event": "rolled_back"})
        self._events.write(_restart(step, now))

    def show(self, step: int, tag: str, text: str) -> None:
        """Show ``text`` in TensorBoard's Text tab as it is: every line is code, of which Markdown understands
        nothing."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        # A code block needs a line before it that is none.
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        self._events.write(_event(step, clock.time(), text_pb(tag, f"step {step}\n\n{lines}")))

    def configured(self, values: Mapping[str, bool | float | str], metrics: Sequence[str]) -> None:
        """Show the run's settings in TensorBoard's HParams tab, beside the last value of each of ``metrics``."""
        from tensorboard.plugins.hparams import summary_v2 as hparams

        described = [hparams.HParam(name) for name in values]
        wanted = [hparams.Metric(in_tensorboard(tag), display_name=tag) for tag in metrics]
        for summary in (hparams.hparams_config_pb(described, wanted), hparams.hparams_pb(values)):
            self._events.write(_event(0, clock.time(), summary))

    def close(self) -> None:
        """Flush both files and close them; a second call does nothing."""
        self._file.close()
        self._events.close()

    def _append(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _EventFile:
    """A file as TensorBoard reads them; the writer of its own package ends for good when a disk is full."""

    def __init__(self, folder: Path, incarnation: int) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter  # 0.2 s, so not at import

        now = clock.time()
        name = f"events.out.tfevents.{now:010.0f}.{socket.gethostname()}.{os.getpid()}.0.inc-{incarnation:06d}"
        self._lines = Lines(folder / name)
        self._records = RecordWriter(self._lines)
        self.write(_first(now))

    def write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


def _first(time: float) -> Event:
    from tensorboard.compat.proto import event_pb2

    return event_pb2.Event(wall_time=time, file_version="brain.Event:2")


def _summary(step: int, time: float, scalars: Mapping[str, float]) -> Event:
    from tensorboard.compat.proto import summary_pb2

    values = [summary_pb2.Summary.Value(tag=in_tensorboard(tag), simple_value=v) for tag, v in scalars.items()]
    return _event(step, time, summary_pb2.Summary(value=values))


def _event(step: int, time: float, summary: Summary) -> Event:
    from tensorboard.compat.proto import event_pb2

    return event_pb2.Event(wall_time=time, step=step, summary=summary)


def _restart(step: int, time: float) -> Event:
    """The event by which TensorBoard drops the points of `step` and later that it has read so far."""
    from tensorboard.compat.proto import event_pb2

    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    return event_pb2.Event(wall_time=time, step=step, session_log=start)
