"""A group as local processes: one a role, or the parent of its ranks, started together and killed
together."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil

from relax_hpc.base.local_dir import LOCAL_DIR
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise import leftovers
from relax_hpc.cluster.supervise.command import Command
from relax_hpc.cluster.supervise.group import Incarnation, Member
from relax_hpc.cluster.supervise.launch_records import Launch, record
from relax_hpc.cluster.supervise.leftovers import end_leftovers
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import ranks_of, roles_of, variables_of
from relax_hpc.net.rendezvous.process import (
    END_SIGNAL,
    PARENT,
    STACKS_SIGNAL,
    clean_environment,
    handles_stack_signal,
)


class Processes(Incarnation):
    """Children of this process, each with a session of its own."""

    def ask_to_end(self) -> None:
        for member in self.members:
            if member.process.poll() is None:
                member.process.send_signal(END_SIGNAL)

    def ask_for_stacks(self) -> None:
        """See `Incarnation.ask_for_stacks`. Launchers and engines have no such handler, and would
        end."""
        for process in (one for member in self.members for one in family(member.process.pid)):
            if handles_stack_signal(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(STACKS_SIGNAL)

    def ended(self) -> list[Member]:
        return [member for member in self.members if member.process.poll() is not None]

    def kill(self) -> None:
        """The processes and their children at once, and what these have left behind."""
        kill([process for member in self.members for process in family(member.process.pid)])
        for member in self.members:
            member.process.wait(timeout=30)
        self.end_leftovers()
        self.leave()

    def end_leftovers(self) -> None:
        """End the processes of this incarnation and of those before it, none of which is to
        live."""
        end_leftovers(self.run, self.name, self.incarnation)


class Waiting(Processes):
    """Incarnation that was started ahead and has not begun."""

    def end_leftovers(self) -> None:
        """End nothing: it has started no work, and the incarnation before it is at work."""


class LocalLauncher:
    """Groups as process trees of this machine; they die with this process.

    ``job``: the Slurm job around it, if any, and ``ending``: whether that is about to end.
    """

    def __init__(
        self, run: RunDir, job: str = "", ending: Callable[[], bool] = lambda: False
    ) -> None:
        self.run, self.job, self._ending = run, job, ending

    def commands(self, name: str, incarnation: int) -> dict[str, Command]:
        """Commands of all roles of ``name`` (the controller first in the hub), output to its log
        directory."""
        config = load_resolved(self.run.root, name)
        own = {leftovers.VARIABLE: leftovers.word(self.run, name, incarnation)}
        logs, variables = (
            self.run.logs(name, incarnation),
            environment(config, variables_of(config, name)) | own,
        )
        led = ["--led"] if self.job else []
        return {
            role: Command(
                words=[*command(self.run, config, name, role, incarnation), *led],
                env=variables,
                log=logs / f"{role}.log",
                config=config,
            )
            for role in roles_of(config, name)
        }

    def start(
        self, name: str, incarnation: int, launch: Launch, ahead: Incarnation | None = None
    ) -> Processes:
        """See `Launcher.start`."""
        commands = self.commands(name, incarnation)
        self.run.logs(name, incarnation).mkdir(parents=True, exist_ok=True)
        record(self.run, name, incarnation, replace(launch, job=self.job))
        # Of one whose supervisor was killed too.
        end_leftovers(self.run, name, incarnation - 1)
        return Processes(self.run, name, incarnation, begin_members(commands, ahead))

    def start_ahead(self, name: str, incarnation: int, roles: Sequence[str]) -> Waiting:
        """See `Launcher.start_ahead`."""
        commands = self.commands(name, incarnation)
        self.run.logs(name, incarnation).mkdir(parents=True, exist_ok=True)
        return Waiting(
            self.run,
            name,
            incarnation,
            [Member.begin(role, commands[role], ahead=True) for role in roles],
        )

    def adopt(self, name: str, incarnation: int) -> None:
        """None: processes die with their supervisor."""

    def whole(self, name: str) -> bool:
        return True

    def lost(self, name: str) -> bool:
        return False

    def ending(self) -> bool:
        return self._ending()

    def hand_over(self, name: str, reason: str) -> str:
        return ""


def begin_members(commands: Mapping[str, Command], ahead: Incarnation | None) -> list[Member]:
    """One a role: who was started ``ahead``, and whoever has to be started now."""
    begun = {member.role: member for member in ahead.members} if ahead else {}
    return [begun.get(role) or Member.begin(role, command) for role, command in commands.items()]


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
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def role_words(
    run: RunDir, group: str, role: str, incarnation: int, module: str = "relax_hpc.roles"
) -> list[str]:
    """Arguments of a Python interpreter that becomes a rank of ``role``, by ``module``."""
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


def command(run: RunDir, config: Config, group: str, role: str, incarnation: int) -> list[str]:
    """Command line that starts ``role`` on this machine."""
    ranks = ranks_of(config, group, role)
    together = ["-m", "relax_hpc.cluster.supervise.ranks", str(ranks)] if ranks > 1 else []
    return [sys.executable, *together, *role_words(run, group, role, incarnation)]


def environment(config: Config, extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment variables of a run's processes; ``extra`` are a group's own."""
    own = {"OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    # Libraries would pick a GPU that they can see, whatever the configuration says.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if config.model.device == "cpu" else {}
    if config.site.local_dir and LOCAL_DIR not in os.environ:
        # As batch scripts do.
        own[LOCAL_DIR] = f"{config.site.local_dir}/{os.environ.get('USER') or os.getuid()}-relax"
    return (
        clean_environment()
        | own
        | config.site.env
        | (extra or {})
        | hidden
        | {PARENT: str(os.getpid())}
    )
