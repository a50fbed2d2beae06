"""Base of the trackers of services, which cannot delete points.

If training returns to an earlier step, the service gets a new run: it begins with the steps that
still count, and the run before it is marked as rolled back. Each curve then has one value a step.

Everything else follows from metrics.jsonl and the number of the present line. So a tracker that is
killed anywhere continues with the same run of the service, and its repeated lines have the same
numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from relax_hpc.base.metrics.read import merge_lines, parse_lines
from relax_hpc.base.metrics.trackers import Tracker
from relax_hpc.base.metrics.writer import METRICS_FILE, RESERVED

PROJECT = "relax_hpc"
"""Project of runs in the service, unless the variable of the service names another one."""
_PRIVATE_SECTIONS = ("name", "run_dir", "groups", "site", "slurm")
"""Sections of a configuration that stay here: paths, accounts, variables of the environment."""
_PRIVATE_WORDS = ("token", "secret", "password", "api_key", "env.")
_ID_DIGITS = 12


class ServiceTracker(Tracker):
    """Tracker of a service. A derived class opens, fills and closes runs of the service."""

    package: ClassVar[str]

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(run_dir, settings)
        self._path = run_dir / METRICS_FILE
        self._is_open = False

    def open_run(self, name: str, identity: str) -> None:
        """Open the run of the service with this ``identity``, or make it with this ``name``."""
        raise NotImplementedError

    def send(self, number: int, step: int, values: Mapping[str, float], time: float) -> None:
        """Send the values of a step. ``number`` rises from call to call within a run, and is the
        same if the values are sent again."""
        raise NotImplementedError

    def close_run(self, rolled_back_to: int | None) -> None:
        """Close the open run. ``rolled_back_to``: training has returned to this step, so that the
        run has values that no longer count; None: they all count."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Send the values of a line."""
        self._open()
        self.send(self.line_number, step, values, time)

    def rolled_back(self, step: int) -> None:
        """Mark the run of the service, and begin a new one with the steps before ``step``."""
        self._open()
        self._close(step)
        self._open(with_present_line=True)
        lines, _ = parse_lines(self._first_lines(self.line_number + 1))
        for number, row in enumerate(merge_lines(lines).rows):
            values = {tag: value for tag, value in row.items() if tag not in RESERVED}
            self.send(number, row["step"], values, row["time"])

    def finish(self) -> None:
        """Close the open run."""
        if self._is_open:
            self._close(None)

    def _open(self, with_present_line: bool = False) -> None:
        """Open the run for the present line, unless a run is open."""
        if self._is_open:
            return
        end = self.line_number + with_present_line
        lines, _ = parse_lines(self._first_lines(end))
        rollbacks = sum("event" in line for line in lines)
        suffix = f"-r{rollbacks}" if rollbacks else ""
        name = str(self.settings.get("name") or self.run_dir.name)
        self.open_run(f"{name}{suffix}", f"{self._identity()}{suffix}")
        self._is_open = True

    def _close(self, rolled_back_to: int | None) -> None:
        self._is_open = False
        self.close_run(rolled_back_to)

    def _identity(self) -> str:
        """Identity of the run: the same for each process that follows it, and another one for a
        copy of its folder."""
        first_line = next(self._first_lines(1), b"")
        key = str(self.run_dir.resolve()).encode() + b"\0" + first_line
        return hashlib.sha256(key).hexdigest()[:_ID_DIGITS]

    def _first_lines(self, count: int) -> Iterator[bytes]:
        """The first ``count`` lines of metrics.jsonl."""
        with self._path.open("rb") as file:
            yield from islice(file, count)

    def shown_settings(self) -> dict[str, bool | float | str]:
        """Settings of the run by their dotted keys, for the service. Sections about the site, and
        keys that may hold a secret, are left out."""
        shown = {}
        for key, value in _leaves(self.settings):
            is_private = key.partition(".")[0] in _PRIVATE_SECTIONS
            if not is_private and not any(word in key.lower() for word in _PRIVATE_WORDS):
                shown[key] = value
        return shown

    def local_folder(self, name: str) -> Path:
        """Folder in the run directory for local files of the service."""
        folder = self.run_dir / "trackers" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """(dotted key, value) of each plain value in nested mappings."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{name}", value
