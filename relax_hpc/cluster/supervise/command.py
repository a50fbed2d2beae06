"""Command that a launcher starts for one role of a group.

The child process is either the role itself or the parent of the role's ranks.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relax_hpc.config import Config

AHEAD = "--ahead"
"""Argument of a rank that imports what its role needs and then waits for the signal to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command of one role. Equal commands start the same ranks with the same code and settings."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    log: Path
    """Log file for the output of the child."""
    config: Config
    """Configuration of the group, as its ranks read it when they begin."""
    late_arguments: Callable[[], Sequence[str]] = field(default=tuple, compare=False)
    """Function that returns further arguments at the start, such as the end of the allocation.
    They do not count in a comparison, because they do not change the ranks."""

    def start(self, ahead: bool = False) -> subprocess.Popen:
        """Start the child in a new session. With ``ahead``, each of its ranks waits for a byte on
        its standard input."""
        arguments = [*self.arguments, *self.late_arguments(), *([AHEAD] if ahead else [])]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE if ahead else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.env),
                start_new_session=True,
            )
