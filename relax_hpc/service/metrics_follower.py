"""Follows metrics.jsonl and keeps its newest values in memory."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

from relax_hpc.base.foreign_files import open_in_run
from relax_hpc.base.metrics.read import is_step, parse_lines
from relax_hpc.base.metrics.writer import METRICS_FILE, RESERVED

_READ_BYTES = 1 << 22
"""Most bytes that one call reads, so that a long file does not delay the service."""
KEPT_ROWS = 2000
"""Number of newest lines that are kept."""


class MetricsFollower:
    """The newest values of metrics.jsonl. `poll` reads the lines since its last call."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_FILE
        self._offset = 0
        self._partial = b""
        self.values: dict[str, float] = {}
        """Newest value of each tag."""
        self.rows: deque[dict[str, Any]] = deque(maxlen=KEPT_ROWS)
        """Newest lines in the order of the file, unmerged."""
        self.step = -1
        """Step of the newest line of a training step; -1: the file has no such line."""
        self.time = 0.0
        """Wall-clock time of that line."""

    def poll(self) -> bool:
        """Read new lines. Returns whether the file has more of them. OSError: the file cannot be
        read now."""
        if not self._path.exists():
            return False
        with open_in_run(self._path) as file:
            size = file.seek(0, 2)
            if size < self._offset:
                # The file was replaced, as by a copy of the run.
                self._offset, self._partial = 0, b""
            file.seek(self._offset)
            data = file.read(_READ_BYTES)
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        parsed, _ = parse_lines(lines)
        for line in parsed:
            self._take(line)
        return self._offset < size

    def _take(self, line: dict[str, Any]) -> None:
        self.rows.append(line)
        if "event" in line:
            return
        for tag, value in line.items():
            if tag not in RESERVED and isinstance(value, int | float):
                self.values[tag] = float(value)
        if is_step(line) and math.isfinite(line["time"]):
            self.step, self.time = line["step"], line["time"]
