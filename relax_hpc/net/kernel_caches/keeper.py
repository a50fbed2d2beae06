"""`python -m relax_hpc.net.kernel_caches.keeper`: add new kernels of this node to its archive.

It runs with the lowest priority, so that steps stay as fast, and writes while no library compiles.
Standard input ends it: if it is closed, immediately; if it has a line, after a last look for new
kernels.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from relax_hpc.base.foreign_files import parse_json
from relax_hpc.net.kernel_caches.node import KernelCaches, keep_new_files, list_files, say
from relax_hpc.net.rendezvous.process import set_private_umask, stop_signals

POLL_S = 20.0
"""Seconds between two looks while files change. Files are written when two looks agree."""
_MAX_POLL_S = 600.0
_LAST_WAIT_S = 60.0
"""Seconds for which the last look waits for the lease of another writer."""
_LAST_CHECK_S = 0.5


def keep(caches: KernelCaches, poll_s: float = POLL_S) -> None:
    """Add new kernels until standard input ends. OSError: a disk is full or fails."""
    pause_s, files = poll_s, list_files(caches.root)
    while True:
        if select.select([sys.stdin], [], [], pause_s)[0]:
            if os.read(sys.stdin.fileno(), 1):
                _keep_last(caches)
            return
        previous, files = files, list_files(caches.root)
        if files != previous:
            pause_s = poll_s
            continue
        _say_if_any(keep_new_files(caches))
        pause_s = min(2 * pause_s, _MAX_POLL_S)


def _keep_last(caches: KernelCaches) -> None:
    """Add new files before the job ends. Another node may be writing."""
    deadline = time.monotonic() + _LAST_WAIT_S
    while (line := keep_new_files(caches)) is None and time.monotonic() < deadline:
        time.sleep(_LAST_CHECK_S)
    _say_if_any(line)


def _say_if_any(line: str | None) -> None:
    if line:
        say(line)


def main() -> int:
    """Read the caches from the command line and keep them."""
    set_private_umask()
    os.nice(19)
    # Slurm signals all processes of a step. This one ends when its role has ended.
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    fields = parse_json(sys.argv[1])
    caches = KernelCaches(Path(fields["archive"]), Path(fields["root"]), fields["key"])
    try:
        keep(caches)
    except OSError as error:
        say(f"{caches.archive} is not written: {error.strerror or error}; the run continues")
    return 0


if __name__ == "__main__":
    sys.exit(main())
