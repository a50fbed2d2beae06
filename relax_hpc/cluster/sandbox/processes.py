"""Processes of a sandbox. They are identified by their files, and killed by pid and start time."""

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
    """Wait until `done`. After `seconds`, raise DeadlineError with the text `failure`, which names
    the log to read."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise DeadlineError(f"sandbox: {failure} (waited {seconds:g} s)")
        time.sleep(_POLL_S)


def daemons(folder: Path) -> dict[str, list[psutil.Process]]:
    """Living daemons of the sandbox in `folder`, by name (munged, slurmctld, slurmd-NODE).

    A daemon has files of the sandbox in its command line. While a daemon forks, several processes
    have its name; the oldest is first.
    """
    by_name: dict[str, list[psutil.Process]] = {}
    for process in _all():
        with suppress(psutil.Error):
            name = _daemon_name(process.cmdline(), folder)
            if name:
                by_name.setdefault(name, []).append(process)
    return by_name


def _daemon_name(arguments: list[str], folder: Path) -> str:
    program = Path(arguments[0]).name if arguments else ""
    if program == "munged" and f"--socket={folder}/run/munge.sock" in arguments:
        return program
    if program in ("slurmctld", "slurmd") and f"{folder}/etc/slurm.conf" in arguments:
        return f"slurmd-{arguments[arguments.index('-N') + 1]}" if program == "slurmd" else program
    return ""


def steps(folder: Path, node: str = "") -> list[psutil.Process]:
    """The slurmstepd processes of `node`, or of all nodes."""
    # slurmstepd replaces its command line by a title without the node. It inherits the open log
    # file of the node's slurmd.
    logs = {str(path) for path in (folder / "log").glob(f"slurmd-{node or '*'}.log")}
    stepds = []
    for process in _all():
        with suppress(psutil.Error):
            if not process.name().startswith("slurmstepd"):
                continue
            if logs & {file.path for file in process.open_files()}:
                stepds.append(process)
    return stepds


def tasks(folder: Path, node: str = "") -> list[psutil.Process]:
    """Processes that Slurm started on `node`, or on any node, even if they have another parent
    now."""
    conf, processes = f"{folder}/etc/slurm.conf", []
    for process in _all():
        with suppress(psutil.Error, OSError):
            variables = process.environ()
            task_node = variables.get("SLURMD_NODENAME", "")
            is_on_node = task_node and task_node == (node or task_node)
            if variables.get("SLURM_CONF") == conf and is_on_node:
                processes.append(process)
    return processes


def families(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """`roots` and all their descendants, each once."""
    by_pid: dict[int, psutil.Process] = {}
    for root in roots:
        by_pid[root.pid] = root
        with suppress(psutil.Error):
            by_pid |= {child.pid: child for child in root.children(recursive=True)}
    return list(by_pid.values())


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to those that still run, the youngest first.

    If a parent ended first, the process group of its children could become an orphaned one. The
    kernel then sends SIGHUP and SIGCONT to its stopped members (POSIX, `_exit`), so that frozen
    children would wake up and still react to the death.
    """
    for process in sorted(processes, key=_started_at, reverse=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _started_at(process: psutil.Process) -> float:
    """Time of the start, seconds since the epoch; 0 if the process has ended."""
    try:
        return process.create_time()
    except psutil.Error:
        return 0.0


def freeze(processes: Iterable[psutil.Process]) -> None:
    """Send SIGSTOP to those that still run."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()


def terminate(processes: list[psutil.Process], seconds: float) -> None:
    """Send SIGTERM, and after `seconds` SIGKILL to those that still run."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    until_gone(processes, seconds)
    kill(process for process in processes if alive(process))
    until_gone(processes, seconds)


def until_gone(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until all have ended, but at most `seconds`."""
    with suppress(DeadlineError):
        until(lambda: not any(map(alive, processes)), seconds, "")


def alive(process: psutil.Process) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> list[str]:
    """Arguments of a process; empty if it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _all() -> Iterator[psutil.Process]:
    """All processes except zombies, oldest first."""
    return (process for process in all_processes() if alive(process))
