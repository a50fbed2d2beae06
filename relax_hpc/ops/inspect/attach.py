"""`relax-hpc attach`: a shell, or another command, on the node of a rank of a running group, with
its environment and in its container."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import psutil

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.cluster.supervise.processes import INCARNATION_VARIABLE
from relax_hpc.net.rendezvous.process import PARENT
from relax_hpc.ops.inspect.group_processes import read_group
from relax_hpc.ops.inspect.on_node import NodeProcess
from relax_hpc.ops.inspect.slurm_access import GroupAccess, open_group
from relax_hpc.ops.inspect.stacks import open_run

_LEFT_OUT = (INCARNATION_VARIABLE, PARENT)
"""Variables of a role that a shell must not have: with the first one, the supervisor would kill the
shell with the leftovers of the role."""


def main(root: str, group: str, role: str = "", rank: int = 0, program: Sequence[str] = ()) -> int:
    """Replace this process by ``program``, or by a shell, on the node of a rank.

    RelaxError: the group does not run."""
    run = open_run(root)
    access = open_group(run, group)
    process = select_rank(access, read_group(access), role, rank)
    variables = {
        "RELAX_RUN": str(run.root),
        "RELAX_GROUP": group,
        "RELAX_ROLE": process.role,
        "RELAX_RANK": str(rank),
        "RELAX_PID": str(process.pid),
        "RELAX_LOG": process.log,
    }
    print(
        f"{group}/{process.role} rank {rank}: process {process.pid} on {process.node}; its log is "
        "in $RELAX_LOG, its number in $RELAX_PID",
        file=sys.stderr,
        flush=True,
    )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    words = list(program) or [_shell(access), *(["-i"] if is_terminal else [])]
    if access.job is None:
        return _exec(words, _environment_of(process.pid) | variables)
    # srun can only make a terminal for a task if it has one itself.
    options = ["--pty"] if is_terminal else []
    return _exec(access.srun(words, process.node, options), access.environment() | variables)


def select_rank(
    access: GroupAccess, processes: Sequence[NodeProcess], role: str, rank: int
) -> NodeProcess:
    """The process of ``rank`` of ``role``; empty: of the first role of the group that has it."""
    ranks = [process for process in processes if process.is_rank and process.rank is not None]
    matches = [process for process in ranks if process.rank == rank and role in ("", process.role)]
    if matches:
        return matches[0]
    if not ranks:
        raise RelaxError(
            f"{access.group}: none of its ranks runs now; see relax-hpc status {access.run.root}"
        )
    allowed = ", ".join(sorted({f"{process.role} rank {process.rank}" for process in ranks}))
    wanted = f"{role} rank {rank}".strip()
    raise ConfigError(f"--rank: found {wanted} of group {access.group}, allowed: {allowed}")


def _shell(access: GroupAccess) -> str:
    """Shell of the user; in a container, which may not have it, the one that every image has."""
    if access.config.site.container.runtime != "none":
        return "/bin/sh"
    return os.environ.get("SHELL") or "/bin/sh"


def _environment_of(pid: int) -> dict[str, str]:
    """Environment with which a process was started, on the terminal of this command."""
    variables = dict[str, str]()
    with contextlib.suppress(psutil.Error):
        variables = psutil.Process(pid).environ()
    terminal = {name: os.environ[name] for name in ("TERM", "HOME", "USER") if name in os.environ}
    kept = {name: text for name, text in variables.items() if name not in _LEFT_OUT}
    return (kept or dict(os.environ)) | terminal


def _exec(program: Sequence[str], environment: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(program[0], list(program), environment)
    except OSError as error:
        raise RelaxError(f"{program[0]}: cannot be started: {error.strerror}") from error
