"""One incarnation of a group: what its supervisor can observe and do. Launchers create them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from relax_hpc.base.background import run_in_thread
from relax_hpc.base.errors import EXIT_RETRY, RelaxError
from relax_hpc.base.last_error import read_last_error
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.command import Command
from relax_hpc.cluster.supervise.launch_records import Launch, read_mark
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark

_LONGEST_OUTPUT = 300
"""Characters of a process's last output that appear in a message."""
_RANK_LOG = re.compile(r"controller\.log|.*-rank-\d+\.log")
_STACKS_S, _LOOK_S = 0.5, 0.02
"""Seconds for the processes of a dead group to write their stacks (it takes milliseconds), and
seconds between two checks."""


class Unavailable(RelaxError):
    """Failure of what a launcher needs. ``is_temporary``: the same may succeed later."""

    is_temporary = True


@dataclass(slots=True)
class Member:
    """A role of the group. A member without a process was started by an earlier supervisor; only
    its exit mark shows its end."""

    role: str
    process: subprocess.Popen | None = None
    pidfd: int = -1
    command: Command | None = None
    """Command that started the process."""

    @classmethod
    def from_process(
        cls, role: str, process: subprocess.Popen, command: Command | None = None
    ) -> Member:
        """Member with a descriptor that becomes readable when the process ends."""
        # A pidfd lets one `select` wait for many processes, and is safe if the kernel reuses a pid.
        return cls(role, process, os.pidfd_open(process.pid), command)

    @classmethod
    def start(cls, role: str, command: Command, ahead: bool = False) -> Member:
        """Start the role's process; see `Command.start`."""
        return cls.from_process(role, command.start(ahead), command)

    @property
    def child(self) -> subprocess.Popen:
        """Process of a member that this supervisor has started."""
        assert self.process is not None
        return self.process


class Incarnation(ABC):
    """The processes of one incarnation of a group."""

    outlives_supervisor = False
    """Whether it continues to run when its supervisor ends, so that another can take it over."""

    def __init__(self, run: RunDir, name: str, incarnation: int, members: list[Member]) -> None:
        self.run, self.name, self.incarnation, self.members = run, name, incarnation, members

    def ended_members(self) -> list[Member]:
        """Members whose process has ended, or that wrote an exit mark."""
        return [
            member
            for member in self.members
            if (member.process and member.process.poll() is not None) or self.exit_mark(member)
        ]

    def exit_mark(self, member: Member) -> dict:
        """Exit mark of the member's role; empty if it has written none."""
        return read_mark(self.run, self.name, self.incarnation, member.role)

    def last_output(self, member: Member) -> str:
        """Last error that the member or its launcher printed, or else the last line."""
        logs = self.run.logs(self.name, self.incarnation)
        for path in (logs / f"{member.role}-srun.log", logs / f"{member.role}.log"):
            error = read_last_error(path).text
            if error:
                return error[:_LONGEST_OUTPUT]
            lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
            if lines:
                return lines[-1][:_LONGEST_OUTPUT]
        return ""

    def is_alive(self) -> bool:
        """Whether any role still runs."""
        return len(self.ended_members()) < len(self.members)

    @abstractmethod
    def request_end(self) -> None:
        """Ask every running role to save and end."""

    def dump_stacks(self) -> None:
        """Make all processes that may hang write the stacks of their threads to their logs, and
        wait a moment for it."""
        logs = [
            path
            for path in self.run.logs(self.name, self.incarnation).glob("*.log")
            if _RANK_LOG.fullmatch(path.name)
        ]
        # A broken file system must not prevent the replacement of the group.
        with contextlib.suppress(OSError):
            first_sizes = [path.stat().st_size for path in logs]
            # Slurm 22.05 may take 20 s to report that a node does not answer.
            run_in_thread(self.request_stacks)
            # A stopped process, or one on a dead node, never writes its stacks.
            deadline, last_sizes = time.monotonic() + _STACKS_S, first_sizes
            while time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                sizes = [path.stat().st_size for path in logs]
                has_grown = all(
                    size > first for size, first in zip(sizes, first_sizes, strict=True)
                )
                if has_grown and sizes == last_sizes:
                    return
                last_sizes = sizes

    @abstractmethod
    def request_stacks(self) -> None:
        """Send STACKS_SIGNAL to all processes that handle it."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all processes of this incarnation. The object must not be used afterwards."""

    def end(self) -> None:
        """Kill all processes, and write an exit mark for each role without one, so that no process
        waits for it."""
        roles = [member.role for member in self.members]
        self.kill()
        for role in roles:
            # A full disk is no reason to end the other groups too.
            with contextlib.suppress(OSError):
                if not read_mark(self.run, self.name, self.incarnation, role):
                    mark = self.run.exit_mark(self.name, self.incarnation, role)
                    write_exit_mark(mark, EXIT_RETRY, "ended by its supervisor", patience_s=0.0)

    def detach(self) -> None:
        """Stop supervising the processes, without ending them."""
        for member in self.members:
            if member.pidfd >= 0:
                os.close(member.pidfd)
        self.members.clear()


class Launcher(Protocol):
    """Creator of incarnations of a group. Methods that start or query something may raise
    Unavailable."""

    def commands(self, name: str, incarnation: int) -> dict[str, Command]:
        """Command for each role of a group under ``incarnation``, by the present settings."""
        ...

    def start(
        self, name: str, incarnation: int, launch: Launch, ahead: Incarnation | None = None
    ) -> Incarnation:
        """Start every role of a group under ``incarnation``, and record the start.

        Members of ``ahead`` run already and wait. The caller signals them to begin after the start
        is recorded.
        """
        ...

    def start_ahead(self, name: str, incarnation: int, roles: Sequence[str]) -> Incarnation:
        """Start ``roles`` of a group in advance; their ranks wait for the signal to begin as
        ``incarnation``."""
        ...

    def adopt(self, name: str, incarnation: int) -> Incarnation | None:
        """Incarnation that an earlier supervisor started and that still runs; None if it cannot be
        taken over."""
        ...

    def has_all_nodes(self, name: str) -> bool:
        """Whether the group has all nodes that it needs to restart in place."""
        ...

    def has_lost_nodes(self, name: str) -> bool:
        """Whether nodes of the group are lost for good, so that it cannot restart in place."""
        ...

    def is_ending(self) -> bool:
        """Whether the whole allocation is about to end: time limit, preemption, cancellation."""
        ...

    def hand_over(self, name: str, reason: str) -> str:
        """Give the group to a separate job; the job's id, or empty if that is not possible."""
        ...
