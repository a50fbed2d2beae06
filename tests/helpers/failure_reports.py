"""Logs and processes of a run as text, for messages of failed tests."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from relax_hpc.cluster.sandbox.processes import command_line


def log_end(path: Path, lines: int = 25) -> str:
    """Last lines of a log, without lines of progress."""
    kept_lines = [
        line
        for line in path.read_text(errors="replace").splitlines()
        if not line.startswith("eta ")
    ]
    return "\n".join(line[:300] for line in kept_lines[-lines:])


def environment(process: psutil.Process) -> dict[str, str]:
    """Environment variables of a process; empty if it has ended."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def describe_process(process: psutil.Process) -> str:
    """Pid, state, CPU seconds, age in seconds and command of a process."""
    try:
        used_s, age_s = sum(process.cpu_times()[:2]), time.time() - process.create_time()
        return (
            f"{process.pid} {process.status()}, {used_s:.1f} of {age_s:.1f} s, "
            f"{' '.join(command_line(process))[:200]}"
        )
    except psutil.Error as error:
        return str(error)
