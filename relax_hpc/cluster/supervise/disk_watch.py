"""Watch for disks that a run waits for.

The watch reports when a wait begins and ends, and the supervisor asks it before it starts a group.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.disk_waits import describe_wait, is_temporary, probe_folder
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.group import Unavailable

_SILENT_S = 3.0
"""Seconds without an answer of the hub after which this watch probes the disks itself, and seconds
between two probes."""


class NoDiskSpace(Unavailable):
    """A group cannot be started because nothing can be written. The message names path, cause and
    remedy."""


class DiskWatch:
    """Disk watch of one supervisor. It reports by ``say``."""

    def __init__(
        self, run: RunDir, limit_s: float, say: Callable[[str], None], sure_s: float = 0.0
    ) -> None:
        """``limit_s``: a run that waits longer is ended. ``sure_s``: a wait is over if no member
        has reported it for so many seconds. A new hub must first hear from all members."""
        self.run, self.limit_s, self.say, self.sure_s = run, limit_s, say, sure_s
        self.waits: Collection[Mapping[str, Any]] = ()
        """Writes that wait for a disk, by the newest report."""
        self._reported: set[tuple[Path, int]] = set()
        """Folders and error numbers that were reported to the user."""
        self._since: float | None = None
        """Time of the first report of the present wait, monotonic seconds; None: no member
        waits."""
        self._heard_at = 0.0
        """Time of the last report of a wait, monotonic seconds."""
        self._blocked_folders: set[Path] = set()
        """Folders that cannot be written and that a member waits for."""
        self._description = ""
        self._probed_at = 0.0
        self._loose: set[Path] = set()
        """Folders that were reported as full although no member waits for them."""
        self._loose_probed_at: dict[Path, float] = {}

    def update(self, waits: Collection[Mapping[str, Any]], answered_at: float) -> None:
        """Process the disk waits of all members, as the hub reported them at ``answered_at``."""
        now = time.monotonic()
        if now - answered_at > _SILENT_S:
            if now - self._probed_at < _SILENT_S:
                return
            self._probed_at = now
            waits = self._probe_folders()
        else:
            self._blocked_folders |= {
                Path(wait["path"]).parent for wait in waits if not wait["loose"]
            }
        self.waits = list(waits)
        for wait in waits:
            self._report_once(wait)
        self._withdraw_loose({Path(wait["path"]).parent for wait in waits if wait["loose"]})
        if any(not wait["loose"] for wait in waits):
            self._since, self._heard_at = now if self._since is None else self._since, now
        elif self._since is not None and now - self._heard_at >= self.sure_s:
            self.say(f"the disk is written again, after {now - self._since:.0f} s")
            self._since, self._blocked_folders = None, set()
        if not waits and self._since is None:
            self._reported.clear()

    def _probe_folders(self) -> list[Mapping[str, Any]]:
        """Reasons why the run directory or a folder with a wait cannot be written. They may lie on
        several disks."""
        problems: list[Mapping[str, Any]] = []
        for folder in sorted({self.run.root, *self._blocked_folders}):
            # A missing folder, or one that exists on another node only, is not the cause.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                problem = probe_folder(folder)
                if problem:
                    problems.append(problem)
        return problems

    def handle_error(self, path: Path, error: OSError) -> None:
        """Report an error that stops the supervisor itself. Raises ``error`` unless it
        `is_temporary`."""
        if not is_temporary(error):
            raise error
        wait = {"path": str(path), "errno": error.errno, "seconds": 0.0, "loose": False}
        self.update([wait], time.monotonic())

    def _report_once(self, wait: Mapping[str, Any]) -> None:
        """Print one line for each folder and cause."""
        folder = Path(wait["path"]).parent
        key = folder, wait["errno"]
        if not wait["loose"]:
            self._description = describe_wait(wait)
        if key in self._reported or (wait["loose"] and self._takes_data(folder)):
            return
        self._reported.add(key)
        self.say(describe_wait(wait))
        if wait["loose"]:
            self._loose.add(folder)

    def _withdraw_loose(self, still_reported: set[Path]) -> None:
        """Report that loose folders take data again, except those that are ``still_reported``."""
        for folder in sorted(self._loose - still_reported):
            if self._takes_data(folder):
                self._loose.discard(folder)
                self._reported = {key for key in self._reported if key[0] != folder}
                self.say(f"{folder} is written again")

    def _takes_data(self, folder: Path) -> bool:
        """Whether a folder can be written. It is probed once in `_SILENT_S` seconds; the answer in
        between is no."""
        now = time.monotonic()
        if now - self._loose_probed_at.get(folder, -_SILENT_S) < _SILENT_S:
            return False
        self._loose_probed_at[folder] = now
        # A missing folder, or one that exists on another node only, gives no answer.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            return not probe_folder(folder)
        return False

    def timeout_reason(self) -> str:
        """Reason to end the run because it waited too long; empty: the limit is not reached."""
        waited = 0.0 if self._since is None else time.monotonic() - self._since
        if waited <= self.limit_s:
            return ""
        return f"waited {waited:.0f} s for a disk: {self._description}"

    def check_space(self) -> None:
        """Raise NoDiskSpace on a full disk, because a process started now could not even report
        it."""
        problem = probe_folder(self.run.root)
        if problem:
            raise NoDiskSpace(describe_wait(problem))

    def is_full(self) -> bool:
        """Whether nothing can be written now."""
        return bool(probe_folder(self.run.root))
