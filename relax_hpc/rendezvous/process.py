"""What every process of a run does first: die with its parent, and turn signals into an orderly end."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_PREFIXES = ("PMI", "HYDRA", "MPI_", "MPIR_", "OMPI_", "PMIX_", "SLURM_")


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def clean_environment() -> dict[str, str]:
    """This process's environment without what an MPI launcher or Slurm step put there for its own ranks."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }


def on_terminate() -> threading.Event:
    """An event that SIGTERM and SIGINT set."""
    event = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: event.set())
    return event
