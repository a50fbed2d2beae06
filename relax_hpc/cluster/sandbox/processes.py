"""Processes of a sandbox: found by their files, not by name alone, and killed by pid and start
time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.processes import all_processes

_POLL_S = 0.05


def until(done: Callable[[], bool], seconds: float, failure: str) -> None:
    """Return when `done`; DeadlineError with `failure`, which names what to look at, after
    `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise DeadlineError(f"sandbox: {failure} (waited {seconds:g} s)")
        time.sleep(_POLL_S)


def daemons(folder: Path) -> dict[str, list[psutil.Process]]:
    """Living daemons of the sandbox in `folder`, by name (munged, slurmctld, slurmd-NODE).

    A daemon is one with the sandbox's own files in its command line. There may be several processes
    under a name for a moment, when one is forking; the oldest is first.
    """
    found: dict[str, list[psutil.Process]] = {}
    for process in _all():
        with suppress(psutil.Error):
            if name := _daemon_name(process.cmdline(), folder):
                found.setdefault(name, []).append(process)
    return found


def _daemon_name(words: list[str], folder: Path) -> str:
    program = Path(words[0]).name if words else ""
    if program == "munged" and f"--socket={folder}/run/munge.sock" in words:
        return program
    if program in ("slurmctld", "slurmd") and f"{folder}/etc/slurm.conf" in words:
        return f"slurmd-{words[words.index('-N') + 1]}" if program == "slurmd" else program
    return ""


def steps(folder: Path, node: str = "") -> list[psutil.Process]:
    """The slurmstepds of `node`, or of all nodes: they hold the node's slurmd log open and retitle
    themselves."""
    logs = {str(path) for path in (folder / "log").glob(f"slurmd-{node or '*'}.log")}
    found = []
    for process in _all():
        with suppress(psutil.Error):
            if process.name().startswith("slurmstepd") and logs & {
                file.path for file in process.open_files()
            }:
                found.append(process)
    return found


def tasks(folder: Path, node: str = "") -> list[psutil.Process]:
    """Processes that Slurm started on `node`, or on any node, whoever their parent is now."""
    conf, found = f"{folder}/etc/slurm.conf", []
    for process in _all():
        with suppress(psutil.Error, OSError):
            variables = process.environ()
            on = variables.get("SLURMD_NODENAME", "")
            if variables.get("SLURM_CONF") == conf and on and on == (node or on):
                found.append(process)
    return found


def families(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """`roots` and all their descendants, each once."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        found[root.pid] = root
        with suppress(psutil.Error):
            found |= {child.pid: child for child in root.children(recursive=True)}
    return list(found.values())


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def freeze(processes: Iterable[psutil.Process]) -> None:
    """Send SIGSTOP to those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()


def terminate(processes: list[psutil.Process], seconds: float) -> None:
    """Send SIGTERM, and SIGKILL to what is left after `seconds`."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    until_gone(processes, seconds)
    kill(process for process in processes if alive(process))
    until_gone(processes, seconds)


def until_gone(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until all have ended, or for `seconds`."""
    with suppress(DeadlineError):
        until(lambda: not any(map(alive, processes)), seconds, "")


def alive(process: psutil.Process) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> list[str]:
    """Arguments of a process; empty if it has ended, as processes of a live run do at any time."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _all() -> Iterator[psutil.Process]:
    """All processes, oldest first, zombies left out."""
    return (process for process in all_processes() if alive(process))
