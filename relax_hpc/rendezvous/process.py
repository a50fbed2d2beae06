"""What every process of a run does first: die with its parent, and turn signals into an orderly end."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading

from relax_hpc.errors import RelaxError

_PR_SET_PDEATHSIG = 1
PARENT = "RELAX_PARENT"
"""Environment variable: pid of the process that started this one."""
_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(PMI|HYDRA|MPIR?_|OMPI_|TORCHELASTIC|SLURM_).*"
)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends.

    A parent that put its pid into PARENT is also noticed if it has ended by now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.pop(PARENT, "")
    if parent and int(parent) != os.getppid():
        sys.exit(f"process {parent}, which started this one, has ended")


def clean_environment() -> dict[str, str]:
    """This process's environment without what an MPI launcher or Slurm step put there for its own ranks."""
    return {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}


def on_terminate(at_once: bool) -> threading.Event:
    """An event that SIGTERM and SIGINT set; ``at_once`` also raises RelaxError wherever the main thread is or waits."""
    event = threading.Event()

    def handle(*_: object) -> None:
        event.set()
        if at_once:
            raise RelaxError("asked to stop")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return event
