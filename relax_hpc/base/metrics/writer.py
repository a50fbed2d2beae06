"""Writer of a run's metrics, used only by the hub: one JSON line for each step, and TensorBoard."""

from __future__ import annotations

import json
import math
import time as clock
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.metrics.length_counts import LENGTHS
from relax_hpc.base.metrics.trackers.tensorboard import TensorBoard

GENERATED, GENERATED_SUM = "reward/generated", "reward/generated_sum"
"""Number of samples with a reward since the last step, and the sum of their rewards. Filtered
samples count too. Rollouts report both, and the hub computes `reward/mean_generated`."""

COMPONENT_SUM, COMPONENT_COUNT = "reward/component_sum/", "reward/component_count/"
"""Prefixes of the name of a component of the reward, for its sum over samples and their number. The
hub computes `reward/component_<name>`."""

READ, CACHED = "perf/read_tokens", "perf/cached_tokens"
"""Tokens in requests to engines since the last step, and those whose keys and values were cached.
The hub computes `perf/cached_share`."""

SKIPPED = "queue/samples_skipped"

RESERVED = frozenset({"step", "time", "incarnation", "event"})
METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends to <run_dir>/metrics.jsonl, and to one event file in <run_dir>/tensorboard for each
    incarnation.

    Written lines never change. After a resume, `rolled_back` writes which steps no longer count,
    and `relax_hpc.base.metrics.read` leaves them out.

    ::

        with MetricsWriter(run_dir, incarnation=1) as metrics:
            metrics.write(0, {"reward/mean": 0.25})
    """

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        """Open the files to append, and create their folders. `incarnation`: of the hub."""
        self.incarnation = incarnation
        self._file = AppendFile(run_dir / METRICS_FILE)
        self.tensorboard = TensorBoard(run_dir, incarnation)

    def write(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Write scalars of a step. A step may have several lines; of one tag the last value counts.

        Args:
            step: the training step, from 0. Measurements on version v belong to step v.
            values: tag -> a value that float() accepts. NaN and infinities become null in JSON.
            time: wall-clock seconds since 1970. None: now.

        Raises:
            ValueError: a tag has the name of a field of the line.
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
        # Each count would be a chart of its own.
        charts = {tag: value for tag, value in scalars.items() if not tag.startswith(LENGTHS)}
        self.tensorboard.log(step, charts, time)

    def rolled_back(self, step: int) -> None:
        """Write that training resumes at `step`: earlier lines of this and later steps no longer
        count."""
        now = clock.time()
        self._append(
            {"step": step, "time": now, "incarnation": self.incarnation, "event": "rolled_back"}
        )
        self.tensorboard.rolled_back(step)

    def close(self) -> None:
        """Flush and close both files. Safe to call twice."""
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
