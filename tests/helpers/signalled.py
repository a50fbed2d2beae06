"""A process that a signal reaches in the middle of a request, as if somebody had sent it from
outside."""

from __future__ import annotations

import os
from pathlib import Path


def signal_first_calls(signal: int, calls: int, log: str) -> None:
    """Send ``signal`` to this process in its first ``calls`` calls; ``log``: file that counts
    them."""
    with Path(log).open("a") as file:
        file.write(".")
    if count_calls(log) <= calls:
        os.kill(os.getpid(), signal)


def count_calls(log: str) -> int:
    """Calls so far."""
    path = Path(log)
    return path.stat().st_size if path.exists() else 0
