"""A group as local processes: one an MPI launcher or role, started together and killed together."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from relax_hpc.config.schema import Config
from relax_hpc.errors import ConfigError
from relax_hpc.rendezvous.process import PARENT, clean_environment
from relax_hpc.rundir import RunDir


@dataclass(slots=True)
class Member:
    """A running role: the process, and a descriptor that becomes readable when it ends."""

    role: str
    process: subprocess.Popen
    pidfd: int


@dataclass(slots=True)
class GroupProcesses:
    """The processes of one incarnation of a group."""

    name: str
    epoch: int
    members: list[Member] = field(default_factory=list)

    def signal(self, number: int) -> None:
        """Send a signal to every role that still runs."""
        for member in self.members:
            if member.process.poll() is None:
                member.process.send_signal(number)

    def alive(self) -> bool:
        """Whether any role still runs."""
        return any(member.process.poll() is None for member in self.members)

    def kill(self) -> None:
        """Kill all processes of the group and their children at once."""
        kill([process for member in self.members for process in family(member.process.pid)])
        self.reap()

    def reap(self) -> None:
        for member in self.members:
            member.process.wait(timeout=30)
            os.close(member.pidfd)
        self.members.clear()


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants, now."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to processes, known by pid and start time, that are still there."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def mpiexec() -> str:
    """The MPI launcher that belongs to this environment's mpi4py."""
    path = Path(sys.executable).parent / "mpiexec"
    if not path.exists():
        raise ConfigError(f"{path}: no MPI launcher; install the mpich wheel (env/setup.sh does)")
    return str(path)


def command(run: RunDir, config: Config, group: str, role: str, epoch: int) -> list[str]:
    """What starts ``role``: Python itself, or an MPI launcher for a role of several ranks."""
    args = ["-m", "relax_hpc.roles", "--run_dir", str(run.root), "--group", group, "--role", role]
    words = [sys.executable, *args, "--epoch", str(epoch)]
    ranks = getattr(config, role).parallel.ranks if role in ("actor", "actor_fwd", "reference") else 1
    tied = [sys.executable, "-m", "relax_hpc.launch.tied"]
    return words if ranks == 1 else [*tied, mpiexec(), "-n", str(ranks), *words]


def environment(config: Config, extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment variables of a run's processes; ``extra`` are a group's own."""
    own = {"OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    # Libraries would pick a GPU that they can see, whatever the configuration says.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if config.model.device == "cpu" else {}
    return clean_environment() | own | (extra or {}) | hidden | {PARENT: str(os.getpid())}


def start(run: RunDir, config: Config, group: str, epoch: int) -> GroupProcesses:
    """Start every role of ``group`` (the controller first in the hub), output to its log directory."""
    logs = run.logs(group, epoch)
    logs.mkdir(parents=True, exist_ok=True)
    roles = (["controller"] if group == "hub" else []) + list(config.groups[group].roles)
    variables = environment(config, config.groups[group].env)
    processes = GroupProcesses(group, epoch)
    for role in roles:
        with (logs / f"{role}.log").open("ab") as log:
            words = command(run, config, group, role, epoch)
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
            )
        processes.members.append(Member(role, process, os.pidfd_open(process.pid)))
    return processes
