"""Handles of processes as they are now, not as they were when somebody looked before."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from relax_hpc.base.processes import all_processes


def test_a_process_can_be_ended_that_got_the_pid_of_one_seen_before() -> None:
    """psutil's own list, told that it knows this pid from before, gives a handle that refuses the
    signal."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with child:
        try:
            before = next(process for process in psutil.process_iter() if process.pid == child.pid)
            before._ident = (child.pid, 0.0)
            with pytest.raises(psutil.NoSuchProcess):
                next(
                    process for process in psutil.process_iter() if process.pid == child.pid
                ).kill()
            next(process for process in all_processes() if process.pid == child.pid).kill()
            child.wait(timeout=60)
        finally:
            child.kill()
