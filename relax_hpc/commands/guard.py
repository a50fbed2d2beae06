"""A process that cleans up after a local run was killed by SIGKILL, which no handler can catch."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from pathlib import Path
from typing import NoReturn

from relax_hpc.base.orphaned_memory import sweep_orphaned_memory
from relax_hpc.base.rundir import RunDir
from relax_hpc.training.weights.node_cache import clear_staging, staging_root

_PATIENCE_S, _LOOK_S = 10.0, 0.1
"""Seconds for the run's processes to end after it, and seconds between two checks."""


def start_guard(run: RunDir) -> None:
    """Start the guard of a run that this process supervises. This process must have one thread
    only.

    When this process ends, the guard removes files from /dev/shm that no living process of the run
    uses, and ends.
    """
    reader, writer = os.pipe()
    # Only this process keeps the write end open, because programs do not inherit it. The guard
    # reads its end when this process ends.
    if os.fork() == 0:
        _guard(run, reader, writer)
    os.close(reader)


def _guard(run: RunDir, reader: int, writer: int) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.close(writer)
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(devnull, descriptor)
        _close_all_but(0, 1, 2, reader)
        os.read(reader, 1)
        deadline = time.monotonic() + _PATIENCE_S
        while staging_root(run).exists() and time.monotonic() < deadline:
            clear_staging(run)
            time.sleep(_LOOK_S)
        sweep_orphaned_memory()
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _close_all_but(*kept: int) -> None:
    """Close all other descriptors, because a copy of one would keep a lock of the run after its
    process has ended."""
    for path in Path("/proc/self/fd").iterdir():
        if int(path.name) not in kept:
            # The descriptor of the listing itself is closed already.
            with contextlib.suppress(OSError):
                os.close(int(path.name))
