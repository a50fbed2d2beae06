"""Command that a launcher starts for one role of a group: one child, which is the role or stands
for its ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relax_hpc.config import Config

AHEAD = "--ahead"
"""Word after which a rank imports what its role needs and then waits to be told to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Two that are equal make the same ranks of the same incarnation, of the same code and
    settings."""

    words: Sequence[str]
    env: Mapping[str, str]
    log: Path
    """Log that takes what the child prints."""
    config: Config
    """Configuration of the group, as its ranks read it when they begin."""
    last_words: Callable[[], Sequence[str]] = field(default=tuple, compare=False)
    """Further words that are asked for late, because they make no other ranks: the end of the
    allocation."""

    def start(self, ahead: bool = False) -> subprocess.Popen:
        """The child, in a session of its own. ``ahead``: its ranks wait, each for a byte of its
        standard input."""
        words = [*self.words, *self.last_words(), *([AHEAD] if ahead else [])]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.PIPE if ahead else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.env),
                start_new_session=True,
            )
