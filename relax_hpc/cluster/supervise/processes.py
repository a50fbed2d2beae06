"""A group as local processes, which start and end together.

Each role has one child process: the role itself, or the parent of its ranks.

The kernel ends a role with its supervisor, and a reward's worker with its role. A process that a
user's reward, tool or environment has started has no living parent then, and would continue. It has
inherited the environment variable `INCARNATION_VARIABLE`, by which `kill_leftovers` recognises it.
Under Slurm the cgroup of a step ends such processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil

from relax_hpc.base.local_dir import LOCAL_DIR
from relax_hpc.base.orphaned_memory import sweep_orphaned_memory
from relax_hpc.base.processes import all_processes
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.command import Command
from relax_hpc.cluster.supervise.group import Incarnation, Member
from relax_hpc.cluster.supervise.launch_records import Launch, record_launch
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.gpus import hidden_gpu_variables
from relax_hpc.config.groups import group_environment, group_roles, rank_count
from relax_hpc.net.rendezvous.process import (
    END_SIGNAL,
    PARENT,
    STACKS_SIGNAL,
    clean_environment,
    handles_stack_signal,
)

INCARNATION_VARIABLE = "RELAX_INCARNATION"
"""Environment variable that names the incarnation, the group and the run of a process."""


class LocalProcesses(Incarnation):
    """Children of this process, each in a separate session."""

    def request_end(self) -> None:
        for member in self.members:
            if member.child.poll() is None:
                member.child.send_signal(END_SIGNAL)

    def request_stacks(self) -> None:
        """See `Incarnation.request_stacks`."""
        for process in self._all_processes():
            # The signal would end processes without a handler, such as launchers and engines.
            if handles_stack_signal(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(STACKS_SIGNAL)

    def ended_members(self) -> list[Member]:
        return [member for member in self.members if member.child.poll() is not None]

    def kill(self) -> None:
        """Kill the processes, their descendants, and all that these left behind."""
        kill_processes(self._all_processes())
        for member in self.members:
            member.child.wait(timeout=30)
        self.kill_leftovers()
        # Killed ranks of MPICH 4.3 and servers of SGLang 0.5.21 leave files in /dev/shm. The killed
        # roles were their owners, and no other process of this run removes them.
        sweep_orphaned_memory()
        self.detach()

    def _all_processes(self) -> list[psutil.Process]:
        processes: list[psutil.Process] = []
        for member in self.members:
            processes += process_tree(member.child.pid)
        return processes

    def kill_leftovers(self) -> None:
        """Kill remaining processes of this incarnation and of earlier ones."""
        kill_leftovers(self.run, self.name, self.incarnation)


class WaitingProcesses(LocalProcesses):
    """Incarnation that was started ahead and has not begun."""

    def kill_leftovers(self) -> None:
        """Kill nothing: this incarnation has started no work, and the one before it is working."""


class LocalLauncher:
    """Launcher of groups as process trees of this machine, which die with this process.

    ``job``: the Slurm job around it, or empty. ``ending`` returns whether that job is about to end.
    """

    def __init__(
        self, run: RunDir, job: str = "", ending: Callable[[], bool] = lambda: False
    ) -> None:
        self.run, self.job, self._ending = run, job, ending

    def commands(self, name: str, incarnation: int) -> dict[str, Command]:
        """Commands of all roles of ``name``, in the hub the controller first. Their output goes to
        the group's log directory."""
        config = load_resolved(self.run.root, name)
        logs = self.run.logs(name, incarnation)
        variables = role_environment(config, group_environment(config, name))
        variables[INCARNATION_VARIABLE] = incarnation_tag(self.run, name, incarnation)
        led = ["--led"] if self.job else []
        return {
            role: Command(
                arguments=[*role_command(self.run, config, name, role, incarnation), *led],
                env=variables,
                log=logs / f"{role}.log",
                config=config,
            )
            for role in group_roles(config, name)
        }

    def start(
        self, name: str, incarnation: int, launch: Launch, ahead: Incarnation | None = None
    ) -> LocalProcesses:
        """See `Launcher.start`."""
        commands = self.commands(name, incarnation)
        self.run.logs(name, incarnation).mkdir(parents=True, exist_ok=True)
        record_launch(self.run, name, incarnation, replace(launch, job=self.job))
        # If the previous supervisor was killed, its processes may still have children.
        kill_leftovers(self.run, name, incarnation - 1)
        return LocalProcesses(self.run, name, incarnation, start_members(commands, ahead))

    def start_ahead(self, name: str, incarnation: int, roles: Sequence[str]) -> WaitingProcesses:
        """See `Launcher.start_ahead`."""
        commands = self.commands(name, incarnation)
        self.run.logs(name, incarnation).mkdir(parents=True, exist_ok=True)
        return WaitingProcesses(
            self.run,
            name,
            incarnation,
            [Member.start(role, commands[role], ahead=True) for role in roles],
        )

    def adopt(self, name: str, incarnation: int) -> None:
        """None, because local processes die with their supervisor."""

    def has_all_nodes(self, name: str) -> bool:
        return True

    def has_lost_nodes(self, name: str) -> bool:
        return False

    def is_ending(self) -> bool:
        return self._ending()

    def hand_over(self, name: str, reason: str) -> str:
        return ""


def start_members(commands: Mapping[str, Command], ahead: Incarnation | None) -> list[Member]:
    """One member for each role: the one that was started ``ahead``, or else a new one."""
    started = {member.role: member for member in ahead.members} if ahead else {}
    return [started.get(role) or Member.start(role, command) for role, command in commands.items()]


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all its present descendants."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_processes(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to processes. psutil compares pid and start time, so that a reused pid is
    safe."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def incarnation_tag(run: RunDir, group: str, incarnation: int) -> str:
    """Value of INCARNATION_VARIABLE in the processes of a group."""
    return f"{group} {incarnation} {run.root}"


def kill_leftovers(run: RunDir, group: str, last: int) -> None:
    """Kill all processes of this user that belong to incarnations of ``group`` up to ``last``."""
    for process in all_processes():
        # A process may have ended meanwhile or may not be readable, and another program may use
        # the variable with another content.
        with contextlib.suppress(psutil.Error, OSError, LookupError, ValueError):
            if process.uids().effective != os.geteuid() or process.pid == os.getpid():
                continue
            name, number, root = process.environ()[INCARNATION_VARIABLE].split(" ", 2)
            if (name, root) == (group, str(run.root)) and int(number) <= last:
                process.kill()


def role_arguments(
    run: RunDir, group: str, role: str, incarnation: int, module: str = "relax_hpc.roles"
) -> list[str]:
    """Arguments of a Python interpreter that runs one rank of ``role`` with ``module``."""
    args = [
        "--run_dir",
        str(run.root),
        "--group",
        group,
        "--role",
        role,
        "--incarnation",
        str(incarnation),
    ]
    return ["-m", module, *args]


def role_command(run: RunDir, config: Config, group: str, role: str, incarnation: int) -> list[str]:
    """Command line that starts ``role`` on this machine."""
    ranks = rank_count(config, group, role)
    parent = ["-m", "relax_hpc.cluster.supervise.ranks", str(ranks)] if ranks > 1 else []
    return [sys.executable, *parent, *role_arguments(run, group, role, incarnation)]


def role_environment(config: Config, extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment variables of a run's processes; ``extra`` are the variables of a group."""
    defaults = {
        "OMP_NUM_THREADS": str(config.threads),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Libraries use any GPU that they can see, even if model.device is cpu.
    hidden = hidden_gpu_variables() if config.model.device == "cpu" else {}
    if config.site.local_dir and LOCAL_DIR not in os.environ:
        # Batch scripts set the same folder.
        user = os.environ.get("USER") or os.getuid()
        defaults[LOCAL_DIR] = f"{config.site.local_dir}/{user}-relax"
    return (
        clean_environment()
        | defaults
        | config.site.env
        | (extra or {})
        | hidden
        | {PARENT: str(os.getpid())}
    )
