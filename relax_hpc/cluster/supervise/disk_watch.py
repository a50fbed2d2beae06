"""Watch for disks that a run waits for: said when a wait begins and ends, and known before a group
is started."""

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
"""Seconds without an answer of the hub after which the disks are tried instead, and between such
tries."""


class NoRoom(Unavailable):
    """A group cannot be started while nothing can be written; the message names path, cause and
    cure."""


class DiskWatch:
    """Disk watch of one supervisor, which says things by ``say``."""

    def __init__(
        self, run: RunDir, limit_s: float, say: Callable[[str], None], sure_s: float = 0.0
    ) -> None:
        """``limit_s``: a run that waits longer is ended. ``sure_s``: a wait is over when nobody has
        told of it for as long, because a new hub has to hear from everybody first."""
        self.run, self.limit_s, self.say, self.sure_s = run, limit_s, say, sure_s
        self._said: set[tuple[Path, int]] = set()
        self._since: float | None = None
        """Time at which it was first heard that somebody waits, monotonic seconds; None: nobody
        does."""
        self._heard_at = 0.0
        """Time at which that was last heard, monotonic seconds."""
        self._places: set[Path] = set()
        """Folders that cannot be written."""
        self._words = ""
        self._probed_at = 0.0
        self._loose: set[Path] = set()
        """Folders that were said to be full, for which nobody waits."""
        self._loose_probed_at: dict[Path, float] = {}

    def look(self, told: Collection[Mapping[str, Any]], answered_at: float) -> None:
        """Take what the hub has told of all members, at its last answer."""
        now = time.monotonic()
        if now - answered_at > _SILENT_S:
            if now - self._probed_at < _SILENT_S:
                return
            self._probed_at = now
            told = self._try()
        else:
            self._places |= {Path(one["path"]).parent for one in told if not one["loose"]}
        for wait in told:
            self._say_once(wait)
        self._withdraw_loose({Path(wait["path"]).parent for wait in told if wait["loose"]})
        if any(not one["loose"] for one in told):
            self._since, self._heard_at = now if self._since is None else self._since, now
        elif self._since is not None and now - self._heard_at >= self.sure_s:
            self.say(f"the disk is written again, after {now - self._since:.0f} s")
            self._since, self._places = None, set()
        if not told and self._since is None:
            self._said.clear()

    def _try(self) -> list[Mapping[str, Any]]:
        """Hindrances to writing in the run directory, which may lie on several disks, and where
        somebody waits."""
        found = []
        for place in sorted({self.run.root, *self._places}):
            # What is not there, or not on this node, is not what hinders.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                found += [told] if (told := probe_folder(place)) else []
        return found

    def met(self, path: Path, error: OSError) -> None:
        """The supervisor itself cannot go on for it. Raises ``error`` unless it `is_temporary`."""
        if not is_temporary(error):
            raise error
        told = {"path": str(path), "errno": error.errno, "seconds": 0.0, "loose": False}
        self.look([told], time.monotonic())

    def _say_once(self, told: Mapping[str, Any]) -> None:
        """Say one line for each folder and cause."""
        folder = Path(told["path"]).parent
        key = folder, told["errno"]
        if not told["loose"]:
            self._words = describe_wait(told)
        if key in self._said or (told["loose"] and self._takes_data(folder)):
            return
        self._said.add(key)
        self.say(describe_wait(told))
        if told["loose"]:
            self._loose.add(folder)

    def _withdraw_loose(self, waited_for: set[Path]) -> None:
        """Say that folders take data again that nobody waits for; ``waited_for``: not those."""
        for folder in sorted(self._loose - waited_for):
            if self._takes_data(folder):
                self._loose.discard(folder)
                self._said = {key for key in self._said if key[0] != folder}
                self.say(f"{folder} is written again")

    def _takes_data(self, folder: Path) -> bool:
        """Whether a folder can be written; tried once in `_SILENT_S` seconds, and no between."""
        now = time.monotonic()
        if now - self._loose_probed_at.get(folder, -_SILENT_S) < _SILENT_S:
            return False
        self._loose_probed_at[folder] = now
        # A folder that is not there, or not on this node, says nothing.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            return not probe_folder(folder)
        return False

    def too_long(self) -> str:
        """Reason why the run is to end; empty: it is not."""
        waited = 0.0 if self._since is None else time.monotonic() - self._since
        return f"waited {waited:.0f} s for a disk: {self._words}" if waited > self.limit_s else ""

    def check_room(self) -> None:
        """Raise NoRoom on a full disk: a process that is started now could not even say so."""
        if told := probe_folder(self.run.root):
            raise NoRoom(describe_wait(told))

    def hinders(self) -> bool:
        """Whether nothing can be written now."""
        return bool(probe_folder(self.run.root))
