"""Steps and ranks that a configuration, or a later change of the run, profiles."""

from __future__ import annotations

import re
import time

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.changes import change_files
from relax_hpc.config.load import load_resolved
from relax_hpc.config.schema import Config, ProfileConfig

ENGINES = "rollout"
"""Role whose engines are profiled, and not its own processes."""
PROFILED_ROLES = ("actor", "critic", "actor_fwd", "reference", "teacher", ENGINES)
"""Roles that can be profiled."""
_STEPS = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_LOOK_S = 1.0
"""Seconds between two checks for changes, which are files on a shared filesystem."""


def parse_steps(text: str) -> tuple[int, int] | None:
    """First and last step of `profile.steps`; None if it is empty. ConfigError: it is invalid.

    >>> parse_steps("5-7"), parse_steps("5"), parse_steps("")
    ((5, 7), (5, 5), None)
    """
    if not text:
        return None
    match = _STEPS.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ConfigError(
            f"profile.steps: found {text!r}, allowed: a step such as 5, or steps such as 5-7, the "
            "smaller one first"
        )
    return first, last


class ProfilePlan:
    """Steps to profile in one rank of a role. It follows changes of the run."""

    def __init__(self, run: RunDir, config: Config, group: str, role: str, rank: int) -> None:
        self._run, self._group, self._role, self._rank = run, group, role, rank
        self.settings: ProfileConfig = config.profile
        self._steps = self._select()
        self._done: ProfileConfig | None = None
        """Settings whose trace was written, or cannot be written."""
        # A change may have been stored after `config` was loaded, so none counts as read.
        self._changes = list[str]()
        self._looked_at = -_LOOK_S

    @property
    def last_step(self) -> int:
        """Last step to profile; -1: no step."""
        return self._steps[1] if self._steps else -1

    def includes(self, step: int) -> bool:
        """Whether ``step`` is to be profiled."""
        if self._steps is None or self.settings == self._done:
            return False
        return self._steps[0] <= step <= self._steps[1]

    def finish(self) -> None:
        """Profile no further step, unless the settings change."""
        self._done = self.settings

    def refresh(self) -> None:
        """Read changes of the run, at most once a second."""
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            changes = self._list_changes()
            if changes != self._changes:
                self.settings = load_resolved(self._run.root, self._group).profile
                self._changes, self._steps = changes, self._select()
        except (OSError, ConfigError) as error:
            print(f"profile.steps stays as it is: {error}", flush=True)

    def _list_changes(self) -> list[str]:
        return [path.name for path in change_files(self._run, self._group)]

    def _select(self) -> tuple[int, int] | None:
        settings = self.settings
        if self._role not in settings.roles or self._rank not in settings.ranks:
            return None
        return parse_steps(settings.steps)
