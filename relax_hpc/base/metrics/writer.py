"""The metrics of a run, written by the hub alone: one JSON line a step, and the same scalars for
TensorBoard."""

from __future__ import annotations

import json
import math
import time as clock
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.metrics.trackers.tensorboard import TensorBoard

GENERATED, GENERATED_SUM = "reward/generated", "reward/generated_sum"
"""Samples that were drawn and given a reward since the last step, kept or not, and the sum of it:
rollouts report both, and the hub makes `reward/mean_generated` of them."""

COMPONENT_SUM, COMPONENT_COUNT = "reward/component_sum/", "reward/component_count/"
"""Prefixes of the name of a component of the reward: its sum over samples, and over how many. The
hub makes `reward/component_<name>` of them."""

READ, CACHED = "perf/read_tokens", "perf/cached_tokens"
"""Tokens that engines were asked with since the last step, and those of them whose keys and values
they had: the hub makes `perf/cached_share` of both."""

SKIPPED = "queue/samples_skipped"

RESERVED = frozenset({"step", "time", "incarnation", "event"})
METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends to <run_dir>/metrics.jsonl and to one event file an incarnation in
    <run_dir>/tensorboard.

    Nothing that was written is ever changed: after a resume, ``rolled_back`` says which steps no
    longer count and `relax_hpc.base.metrics.read` leaves them out.

    ::

        with MetricsWriter(run_dir, incarnation=1) as metrics:
            metrics.write(0, {"reward/mean": 0.25})
    """

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        """Open for appending, making directories as needed; `incarnation` is the incarnation that
        writes."""
        self.incarnation = incarnation
        self._file = AppendFile(run_dir / METRICS_FILE)
        self.tensorboard = TensorBoard(run_dir, incarnation)

    def write(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Record the scalars of a step; several lines of one step add up, and of one tag the later
        value counts.

        Args:
            step: the training step, from 0. What is measured on version v belongs to step v.
            values: tag -> anything float() takes; NaN and infinities become null in the JSON line.
            time: wall-clock seconds since 1970; now if left out.

        Raises:
            ValueError: a tag has the name of one of the line's own fields.
        """
        if taken := RESERVED.intersection(values):
            raise ValueError(
                f"metrics: {sorted(taken)} are fields of the line itself; use a tag such as "
                "perf/time_s"
            )
        time = clock.time() if time is None else time
        scalars = {tag: float(value) for tag, value in values.items()}
        finite = {tag: value if math.isfinite(value) else None for tag, value in scalars.items()}
        self._append({"step": step, "time": time, "incarnation": self.incarnation, **finite})
        self.tensorboard.log(step, scalars, time)

    def rolled_back(self, step: int) -> None:
        """Training goes on at `step`: what was written before for this and later steps no longer
        counts."""
        now = clock.time()
        self._append(
            {"step": step, "time": now, "incarnation": self.incarnation, "event": "rolled_back"}
        )
        self.tensorboard.rolled_back(step)

    def close(self) -> None:
        """Flush both files and close them; a second call does nothing."""
        self._file.close()
        self.tensorboard.finish()

    def _append(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()
