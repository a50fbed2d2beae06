"""`relax-hpc logs`: print the logs of a run's processes, by default of the newest incarnations."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.base.foreign_files import ForeignFileError, open_in_run
from relax_hpc.base.log_rotation import (
    read_rotated_file,
    read_rotated_lines,
    rotated_files,
    rotation_number,
)
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import escape_controls
from relax_hpc.cluster.supervise.launch_records import all_ended, members_of
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.config import load_resolved
from relax_hpc.net.rendezvous.roster import latest_incarnation

_POLL_S = 0.5
_BLOCK_BYTES = 1 << 16
_MAX_READ_BYTES = 64 << 20
"""Maximum of bytes that are read of a file at a time."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequences of colours, which libraries write into logs. They are removed; other control
characters are escaped."""
_QUIET_S = 3.0
"""Seconds to wait for more lines after the end of a run."""


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Selection of logs; empty or None means all."""

    group: str = ""
    role: str = ""
    rank: int | None = None
    incarnation: int | None = None
    lines: int = 20


def main(root: str, selection: LogFilter, follow: bool = False) -> int:
    """Print the last lines of each selected log; with ``follow`` also lines that are added.

    If there are several logs, each line begins with the name of its log.
    """
    run = RunDir(Path(root))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    paths = find_logs(run, selection)
    if not paths and not follow:
        raise ConfigError(
            f"{run.root / 'logs'}: no selected log exists yet; see relax-hpc status {run.root}"
        )
    tails = {path: Tail(path, _prefix(run, path)) for path in paths}
    for tail in tails.values():
        try:
            lines = tail.last_lines(selection.lines)
        except ForeignFileError as error:
            lines = [f"skipped: {error.strerror}"]
        _print(lines, tail.prefix if len(tails) > 1 else "")
    if follow:
        _follow(run, selection, tails)
    return EXIT_DONE


def find_logs(run: RunDir, selection: LogFilter) -> list[Path]:
    """The selected logs that have text; without a selection also those of supervisors."""
    config = load_resolved(run.root)
    groups = [selection.group]
    if not selection.group:
        groups = [
            name
            for name in members_of(run, config)
            if name in config.groups or not all_ended(run, config, name)
        ]
    paths = list[Path]()
    for group in groups:
        incarnation = selection.incarnation or latest_incarnation(run, group)
        logs = sorted(run.logs(group, incarnation).glob("*.log"))
        paths += [path for path in logs if _is_selected(path.stem, selection)]
    is_default = selection.rank is None and not (
        selection.group or selection.role or selection.incarnation
    )
    if is_default:
        paths += [run.root / "supervisor.log", *sorted((run.root / "logs").glob("*.log"))]
    return [path for path in paths if path.is_file() and _has_text(path)]


def _has_text(path: Path) -> bool:
    return bool(path.stat().st_size or rotated_files(path))


class Tail:
    """Reads a log that grows and is rotated: its beginning moves to numbered files."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path, self.prefix = path, prefix
        self._offset = 0
        self._rotation = 0
        """Number of the newest rotated file that was read."""
        self._partial_line = b""

    def last_lines(self, count: int) -> list[str]:
        """The last lines of the log. `new_lines` continues after them."""
        rotated = rotated_files(self.path)
        self._rotation = max(map(rotation_number, rotated), default=0)
        with open_in_run(self.path) as file:
            position = end = file.seek(0, 2)
            data = b""
            while position and data.count(b"\n") <= count and len(data) < _MAX_READ_BYTES:
                size = min(_BLOCK_BYTES, position)
                position -= size
                file.seek(position)
                data = file.read(size) + data
        self._offset = end
        while not position and rotated:
            missing = count - data.count(b"\n")
            if missing <= 0:
                break
            data = b"".join(deque(read_rotated_lines(rotated.pop()), missing)) + data
        return _lines(data)[-count:] if count else []

    def new_lines(self) -> list[str]:
        """Complete lines since the last call."""
        data = self._read_rotated() + self._read_added()
        *complete, self._partial_line = (self._partial_line + data).split(b"\n")
        lines = list[str]()
        for line in complete:
            lines += _lines(line) or [""]
        return lines

    def _read_rotated(self) -> bytes:
        """New bytes that are in rotated files by now.

        The first new rotated file begins with the bytes that were read from the log before.
        """
        data = b""
        for path in rotated_files(self.path):
            if rotation_number(path) > self._rotation:
                data += read_rotated_file(path)[self._offset :]
                self._offset, self._rotation = 0, rotation_number(path)
        return data

    def _read_added(self) -> bytes:
        with open_in_run(self.path) as file:
            file.seek(self._offset)
            data = file.read(_MAX_READ_BYTES)
        self._offset += len(data)
        return data


def _lines(data: bytes) -> list[str]:
    return _COLOURS.sub("", data.decode(errors="replace")).splitlines()


def _follow(run: RunDir, selection: LogFilter, tails: dict[Path, Tail]) -> None:
    """Print added lines until the run has ended, also of incarnations that start meanwhile."""
    quiet_since = time.monotonic()
    while not _has_ended(run) or time.monotonic() - quiet_since < _QUIET_S:
        for path in find_logs(run, selection):
            tails.setdefault(path, Tail(path, _prefix(run, path)))
        for tail in tails.values():
            # `main` has reported a link that leads out of the run.
            with contextlib.suppress(ForeignFileError):
                lines = tail.new_lines()
                if lines:
                    quiet_since = time.monotonic()
                    _print(lines, tail.prefix if len(tails) > 1 else "")
        time.sleep(_POLL_S)


def _has_ended(run: RunDir) -> bool:
    return run.finished.exists() or bool(read_stop_request(run))


def _is_selected(stem: str, selection: LogFilter) -> bool:
    """Whether a log is selected: ROLE, ROLE-rank-K, ROLE-srun, or a name that an engine chose."""
    role, _, rank = stem.partition("-rank-")
    if selection.rank is not None and rank != str(selection.rank):
        return False
    wanted = selection.role
    return not wanted or role == wanted or role.startswith(f"{wanted}-")


def _prefix(run: RunDir, path: Path) -> str:
    """Prefix of the lines of a log: `rollout/inc-000002/rollout-rank-0: `."""
    base = run.root / "logs" if (run.root / "logs") in path.parents else run.root
    return f"{path.relative_to(base).with_suffix('')}: "


def _print(lines: list[str], prefix: str) -> None:
    sys.stdout.writelines(f"{prefix}{escape_controls(line)}\n" for line in lines)
    sys.stdout.flush()
