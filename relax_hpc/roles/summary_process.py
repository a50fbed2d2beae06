"""Processes that summarise a run for the commands that read it, see `base.block_summaries`."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from relax_hpc.base.background import print_log_line
from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.process import PARENT, clean_environment

MODULE = "relax_hpc.ops.observe.summaries"
PERIOD_S = 30.0
"""Least seconds between the starts of two processes."""
JOURNAL_BYTES = 1 << 20
"""New bytes of the journal from which a process is started: those of some hundred short steps."""
_LONGEST_S = 600.0
_LEAST_CLOSE_S = 1.0


class SummaryProcess:
    """One process at a time. It has the lowest priority, and the run does not depend on it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = -PERIOD_S
        self._summarised = 0
        """Bytes of this controller's journal when the last process started."""

    def poll(self, journal_bytes: int) -> None:
        """Start a process if the journal, which has ``journal_bytes``, has grown enough."""
        if self._is_running():
            if time.monotonic() > self._started_at + _LONGEST_S:
                self._kill()
            return
        is_due = time.monotonic() >= self._started_at + PERIOD_S
        if is_due and journal_bytes - self._summarised >= JOURNAL_BYTES:
            self._start(journal_bytes)

    def close(self, journal_bytes: int, limit_s: float) -> None:
        """Summarise the end of a long run within ``limit_s`` seconds."""
        deadline = time.monotonic() + max(_LEAST_CLOSE_S, limit_s)
        self._wait(deadline)
        if journal_bytes - self._summarised >= JOURNAL_BYTES:
            self._start(journal_bytes)
            self._wait(deadline)

    def _start(self, journal_bytes: int) -> None:
        self._started_at, self._summarised = time.monotonic(), journal_bytes
        command = [sys.executable, "-m", MODULE, str(self._run.root)]
        environment = clean_environment() | {PARENT: str(os.getpid())}
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        except OSError as error:
            print_log_line(f"the run is not summarised: {error}")

    def _is_running(self) -> bool:
        if self._process and self._process.poll() is not None:
            self._process = None
        return self._process is not None

    def _wait(self, deadline: float) -> None:
        """Wait for the process until ``deadline``, then kill it."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill()
        self._process = None

    def _kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None
