"""Phases of the start of an SGLang server, read from its log. A start takes minutes."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Log lines of SGLang 0.5.21. If a later release words them otherwise, a phase is shown for longer.
IMPORTS_BEGIN = "relax_hpc: importing SGLang"
IMPORTS_END = "relax_hpc: SGLang is imported"
"""Lines that `server` prints."""
_PHASES = (
    (re.compile(IMPORTS_BEGIN.encode()), "SGLang is importing libraries"),
    (re.compile(IMPORTS_END.encode()), "SGLang is starting its processes"),
    (re.compile(rb"Load weight begin"), "SGLang is loading weights"),
    (re.compile(rb"Load weight end"), "SGLang is making room for keys and values"),
    (re.compile(rb"Running FlashInfer autotune"), "SGLang is tuning kernels"),
    (re.compile(rb"Capture [^\n]* begin"), "SGLang is capturing CUDA graphs"),
    (re.compile(rb"Uvicorn running|fired up and ready"), "SGLang is about to serve"),
)
STARTING = "SGLang is starting"
"""Phase until the first known line."""
_MAX_READ_BYTES = 1 << 20


class Phases:
    """Follows a log from its present end.

    ::

        phases = Phases(Path("engine-0.log"))
        phases.now()  # for example 'SGLang is loading weights'
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = log.stat().st_size if log.exists() else 0
        self._partial_line, self._phase = b"", STARTING

    def now(self) -> str:
        """The phase of the last known line."""
        with self._log.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                # The log was truncated, see `relax_hpc.base.log_rotation`.
                self._offset = 0
            file.seek(self._offset)
            data = file.read(_MAX_READ_BYTES)
        self._offset += len(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            for pattern, phase in _PHASES:
                if pattern.search(line):
                    self._phase = phase
                    break
        return self._phase
