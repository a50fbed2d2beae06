"""Processes that a group has left behind on this machine.

The kernel ends a role with its supervisor, and a reward's worker with its role. What a reward, a
tool or an environment of a user's has started is nobody's child then, and would go on. All of it
has inherited a word, though. Under Slurm the cgroup of a step does the same.
"""

from __future__ import annotations

import contextlib
import os

import psutil

from relax_hpc.base.processes import all_processes
from relax_hpc.base.rundir import RunDir

VARIABLE = "RELAX_INCARNATION"
"""Environment variable: which incarnation of which group, and of which run."""


def word(run: RunDir, group: str, incarnation: int) -> str:
    """Value of VARIABLE in the processes of a group."""
    return f"{group} {incarnation} {run.root}"


def end_leftovers(run: RunDir, group: str, last: int) -> None:
    """Kill what is there of incarnations of ``group`` up to ``last``, of this user's. Nothing of
    theirs may live."""
    for process in all_processes():
        # One that has ended meanwhile, or that nobody may look into; or a word that is none of
        # ours.
        with contextlib.suppress(psutil.Error, OSError, LookupError, ValueError):
            if process.uids().effective != os.geteuid() or process.pid == os.getpid():
                continue
            name, number, root = process.environ()[VARIABLE].split(" ", 2)
            if (name, root) == (group, str(run.root)) and int(number) <= last:
                process.kill()
