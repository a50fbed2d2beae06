"""Phases of the start of an SGLang server, found in its log (0.5.21): a start takes minutes."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PHASES = (
    (re.compile(rb"Load weight begin"), "SGLang is loading weights"),
    (re.compile(rb"Load weight end"), "SGLang is making room for keys and values"),
    (re.compile(rb"Running FlashInfer autotune"), "SGLang is tuning kernels"),
    (re.compile(rb"Capture [^\n]* begin"), "SGLang is capturing CUDA graphs"),
    (re.compile(rb"Uvicorn running|fired up and ready"), "SGLang is about to serve"),
)
STARTING = "SGLang is starting"
"""Phase until the server logs a known line: its imports alone take a while."""
_MOST_BYTES = 1 << 20


class Phases:
    """Follows a log from where it ends now.

    >>> phases = Phases(Path("engine-0.log"))
    >>> phases.now()
    'SGLang is loading weights'
    """

    def __init__(self, log: Path) -> None:
        self._log, self._at = log, log.stat().st_size if log.exists() else 0
        self._rest, self._now = b"", STARTING

    def now(self) -> str:
        """The phase whose line came last."""
        with self._log.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._at:
                # It was cut meanwhile, see `relax_hpc.base.log_rotation`.
                self._at = 0
            file.seek(self._at)
            found = file.read(_MOST_BYTES)
        self._at += len(found)
        *lines, self._rest = (self._rest + found).split(b"\n")
        for line in lines:
            self._now = next(
                (words for pattern, words in _PHASES if pattern.search(line)), self._now
            )
        return self._now
