"""Groups with engines: the configured one and its further members, as a layout runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from relax_hpc.base.errors import RelaxError
from relax_hpc.queue.operations import Operation

RUNNING, WAITING = "running", "pending"


@dataclass(slots=True)
class GroupState:
    """One group that exists: its processes run, or it waits for nodes or for its start."""

    name: str
    state: str
    job: str = ""
    """Slurm job of a further member; empty: processes of this machine, or of the run's own job."""
    expected_start: float = 0.0
    """Wall-clock time at which Slurm expects to start its job; 0: unknown, or it runs."""
    detail: str = ""

    def message(self, engines: int) -> dict[str, Any]:
        """The group in a report to the hub."""
        return {
            "engines": engines,
            "state": self.state,
            "job": self.job,
            "expected_start": self.expected_start,
            "detail": self.detail,
        }


class StartRefusedError(RelaxError):
    """A group cannot be started, and another attempt would not help. ``reason``: code for
    clients."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GroupMembers(Protocol):
    """Groups of engines in one layout. All methods may be called repeatedly."""

    def groups(self) -> dict[str, GroupState]:
        """Groups that exist, by name, with the configured group first."""

    def start(self, operation: Operation, name: str) -> str:
        """Start a further member for ``operation``; an identifier of the start, such as a job id.
        StartRefusedError, or another RelaxError if a later attempt may succeed."""

    def recover(self, operation: Operation, name: str) -> str:
        """Identifier of a start that an earlier reconciler may have made before it was killed;
        empty: it made none. A recovered member appears in `groups`."""

    def end(self, name: str, force: bool) -> None:
        """End a further member, cleanly unless ``force``. `groups` lists it until it has ended."""

    def lost_reason(self, name: str, start: str) -> tuple[str, str]:
        """Code and text why a member with the identifier ``start`` is missing. Empty: it has to be
        started again."""
