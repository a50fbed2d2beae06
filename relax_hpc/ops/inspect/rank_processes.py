"""Processes of a group on this node: its ranks, and the processes that they have started."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from relax_hpc.base.processes import all_processes, command_text
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.allocation import node_name
from relax_hpc.config.groups import CONTROLLER

_NODE = "SLURMD_NODENAME"
_RANK_LOG = re.compile(r"-rank-(\d+)\.log$")
_MAX_NAME_CHARS = 60


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process of a group."""

    pid: int
    role: str
    rank: int | None
    """Number of the rank that it is, or that has started it. None: it starts or watches ranks."""
    name: str
    """Text for people: its title, or the beginning of its command line."""
    is_rank: bool
    log: str
    """File of its standard error; empty: unknown."""


def find_processes(run: RunDir, group: str, incarnation: int) -> list[RankProcess]:
    """Processes of ``incarnation`` of ``group`` on this node, ranks first.

    Processes that only wait for a rank, such as the one that writes its exit mark, are left out.
    """
    starts = dict[int, psutil.Process]()
    roles = dict[int, str]()
    for process in all_processes():
        with contextlib.suppress(psutil.Error, OSError):
            role = _role_in(process.cmdline(), run, group, incarnation)
            if role and process.uids().effective == os.geteuid() and _is_on_this_node(process):
                starts[process.pid], roles[process.pid] = process, role
    parents = {_parent(process) for process in starts.values()}
    members = list[RankProcess]()
    for pid, process in starts.items():
        # A rank is a leaf of the tree of processes with these arguments. Above it are the launcher
        # of several ranks and the process that watches the rank.
        if pid not in parents:
            members += _with_children(process, roles[pid])
    return sorted(members, key=lambda item: (item.role, item.rank or 0, not item.is_rank, item.pid))


def _role_in(command: list[str], run: RunDir, group: str, incarnation: int) -> str:
    """Role of a process with the arguments of `role_arguments`; empty: it is no such process."""
    options = {}
    for name, value in pairwise(command):
        if name in ("--run_dir", "--group", "--role", "--incarnation"):
            options[name] = value
    wanted = {"--run_dir": str(run.root), "--group": group, "--incarnation": str(incarnation)}
    # srun and the programs that start containers have these words in their arguments, too.
    is_python = bool(command) and "python" in Path(command[0]).name
    if is_python and all(options.get(name) == value for name, value in wanted.items()):
        return options.get("--role", "")
    return ""


def _is_on_this_node(process: psutil.Process) -> bool:
    """Whether Slurm started the process on this node. All nodes of a sandbox see all processes."""
    if _NODE not in os.environ:
        return True
    return process.environ().get(_NODE, node_name()) == node_name()


def _with_children(process: psutil.Process, role: str) -> Iterable[RankProcess]:
    log = output_path(process.pid)
    match = _RANK_LOG.search(log)
    rank = int(match[1]) if match else None
    if role == CONTROLLER:
        rank = 0
    yield RankProcess(process.pid, role, rank, role, True, log)
    with contextlib.suppress(psutil.Error):
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                path = output_path(child.pid)
                yield RankProcess(
                    child.pid, role, rank, command_text(child, _MAX_NAME_CHARS), False, path
                )


def output_path(pid: int) -> str:
    """File of the standard error of a process; empty: unknown."""
    try:
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    except OSError:
        return ""


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0
