"""Processes that a group has left behind on this machine.

The kernel ends a role with its supervisor, and a reward's worker with its role. What a reward, a tool or an environment
of a user's has started is nobody's child then, and would go on. All of it has inherited a word, though. Under Slurm the
cgroup of a step does the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.rundir import RunDir

VARIABLE = "RELAX_INCARNATION"
"""Environment variable: which incarnation of which group, and of which run."""


def word(run: RunDir, group: str, incarnation: int) -> str:
    """What the processes of a group have in VARIABLE."""
    return f"{group} {incarnation} {run.root}"


def end_leftovers(run: RunDir, group: str, last: int) -> None:
    """Kill what is there of incarnations of ``group`` up to ``last``, of this user's. Nothing of theirs may live."""
    for pid, found in _marked():
        name, _, rest = found.partition(" ")
        number, _, root = rest.partition(" ")
        if (name, root) == (group, str(run.root)) and number.isdecimal() and int(number) <= last:
            _kill(pid, found)


def _marked() -> Iterator[tuple[int, str]]:
    """Other processes of this user's with a word, and the word."""
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not place.name.isdecimal() or place.stat().st_uid != os.geteuid() or int(place.name) == os.getpid():
                continue
            if found := _word_of(int(place.name)):
                yield int(place.name), found


def _word_of(pid: int) -> str:
    start = f"{VARIABLE}=".encode()
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((os.fsdecode(one.removeprefix(start)) for one in variables if one.startswith(start)), "")


def _kill(pid: int, found: str) -> None:
    """Unless the number is another process's by now, of another word."""
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            if _word_of(pid) == found:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
