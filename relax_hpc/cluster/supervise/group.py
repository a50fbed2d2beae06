"""One incarnation of a group as its supervisor sees it, and what can be done with it; launchers
make them."""

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

_WORDS = 300
_RANK_LOG = re.compile(r"controller\.log|.*-rank-\d+\.log")
_STACKS_S, _LOOK_S = 0.5, 0.02
"""Seconds until a living process of a group that is to be replaced has written its stacks (it takes
milliseconds), and between looks."""


class Unavailable(RelaxError):
    """Failure of what a launcher needs; ``later``: the same may be possible in a while."""

    later = True


@dataclass(slots=True)
class Member:
    """A role of the group; without a process an earlier supervisor started it, and its end shows in
    its mark."""

    role: str
    process: subprocess.Popen | None = None
    pidfd: int = -1
    command: Command | None = None
    """Command that started the process."""

    @classmethod
    def of(cls, role: str, process: subprocess.Popen, command: Command | None = None) -> Member:
        """Member with a descriptor that becomes readable when the process ends."""
        return cls(role, process, os.pidfd_open(process.pid), command)

    @classmethod
    def begin(cls, role: str, command: Command, ahead: bool = False) -> Member:
        """Start the role's process; see `Command.start`."""
        return cls.of(role, command.start(ahead), command)


class Incarnation(ABC):
    """The processes of one incarnation of a group."""

    outlives = False
    """Whether it lives on when its supervisor ends, so that another can take it over."""

    def __init__(self, run: RunDir, name: str, incarnation: int, members: list[Member]) -> None:
        self.run, self.name, self.incarnation, self.members = run, name, incarnation, members

    def ended(self) -> list[Member]:
        """Members that are gone: their process has ended, or they say so themselves."""
        return [
            m for m in self.members if (m.process and m.process.poll() is not None) or self.mark(m)
        ]

    def mark(self, member: Member) -> dict:
        """Exit mark of the member's role; empty while it has left none."""
        return read_mark(self.run, self.name, self.incarnation, member.role)

    def last_words(self, member: Member) -> str:
        """Last error, or else the last line, of what the member or its launcher printed."""
        for path in (
            self.run.logs(self.name, self.incarnation) / f"{member.role}{end}.log"
            for end in ("-srun", "")
        ):
            if error := read_last_error(path).text:
                return error[:_WORDS]
            lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
            if lines:
                return lines[-1][:_WORDS]
        return ""

    def alive(self) -> bool:
        """Whether any role still runs."""
        return len(self.ended()) < len(self.members)

    @abstractmethod
    def ask_to_end(self) -> None:
        """Ask every role that still runs to end in good order."""

    def dump_stacks(self) -> None:
        """Have all processes that may hang write the stacks of their threads to their logs, which
        takes a moment."""
        logs = [
            path
            for path in self.run.logs(self.name, self.incarnation).glob("*.log")
            if _RANK_LOG.fullmatch(path.name)
        ]
        # A file system that is ill must not keep the group from being replaced.
        with contextlib.suppress(OSError):
            before = [path.stat().st_size for path in logs]
            # Slurm may take 20 s to find that a node does not answer.
            run_in_thread(self.ask_for_stacks)
            # One that is stopped, or whose node does not answer, never writes any.
            deadline, last = time.monotonic() + _STACKS_S, before
            while time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                sizes = [path.stat().st_size for path in logs]
                if sizes == last and all(
                    size > known for size, known in zip(sizes, before, strict=True)
                ):
                    return
                last = sizes

    @abstractmethod
    def ask_for_stacks(self) -> None:
        """Send STACKS_SIGNAL to all processes that take it."""

    @abstractmethod
    def kill(self) -> None:
        """End everything of this incarnation now; the object is of no use afterwards."""

    def end(self) -> None:
        """`kill`, and a mark for each role that left none: nobody shall wait for its word."""
        roles = [member.role for member in self.members]
        self.kill()
        for role in roles:
            # The disk may be full, which is no reason to end the others too.
            with contextlib.suppress(OSError):
                if not read_mark(self.run, self.name, self.incarnation, role):
                    mark = self.run.exit_mark(self.name, self.incarnation, role)
                    write_exit_mark(mark, EXIT_RETRY, "ended by its supervisor", patience_s=0.0)

    def leave(self) -> None:
        """Stop looking after it, without touching it."""
        for member in self.members:
            if member.pidfd >= 0:
                os.close(member.pidfd)
        self.members.clear()


class Launcher(Protocol):
    """Maker of incarnations of a group. Methods that start or ask something may raise
    Unavailable."""

    def commands(self, name: str, incarnation: int) -> dict[str, Command]:
        """Command for each role of a group under ``incarnation``, by the settings of now."""
        ...

    def start(
        self, name: str, incarnation: int, launch: Launch, ahead: Incarnation | None = None
    ) -> Incarnation:
        """Start every role of a group under ``incarnation``, and record that it was started.

        Those ``ahead`` have been, and are to be told to begin once it is recorded.
        """
        ...

    def start_ahead(self, name: str, incarnation: int, roles: Sequence[str]) -> Incarnation:
        """Start ``roles`` of a group, whose ranks wait to be ``incarnation``."""
        ...

    def adopt(self, name: str, incarnation: int) -> Incarnation | None:
        """Incarnation that an earlier supervisor has started and still runs; None if there is
        nothing to take over."""
        ...

    def whole(self, name: str) -> bool:
        """Whether all nodes are there that the group needs to start again in place."""
        ...

    def lost(self, name: str) -> bool:
        """Whether nodes of the group are gone for good, so that it cannot start in place any
        more."""
        ...

    def ending(self) -> bool:
        """Whether the whole allocation is about to end: time limit, preemption, cancellation."""
        ...

    def hand_over(self, name: str, reason: str) -> str:
        """Give the group to a job of its own; the job, or empty where that cannot be."""
        ...
