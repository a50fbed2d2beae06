"""`relax-hpc logs`: what the processes of a run print, of the newest incarnations unless another is
asked for."""

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

_LOOK_S = 0.5
_BLOCK = 1 << 16
_MOST_BYTES = 64 << 20
"""Bytes of a file that are read at a time, at most."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Changes of colour, which libraries write into logs; they are left out, and all other controls are
spelled out."""
_QUIET_S = 3.0
"""Seconds to wait for more lines after the end of a run."""


@dataclass(frozen=True, slots=True)
class WantedLogs:
    """Selection of logs; empty or None: all."""

    group: str = ""
    role: str = ""
    rank: int | None = None
    incarnation: int | None = None
    lines: int = 20


def main(root: str, wanted: WantedLogs, follow: bool = False) -> int:
    """Print the last lines of each file, prefixed by its name when there are several; then what is
    added."""
    run = RunDir(root)
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    found = files(run, wanted)
    if not found and not follow:
        raise ConfigError(
            f"{run.root / 'logs'}: no log of what was asked for yet; see relax-hpc status "
            f"{run.root}"
        )
    tails = {path: Tail(path, _prefix(run, path)) for path in found}
    for tail in tails.values():
        try:
            lines = tail.last(wanted.lines)
        except ForeignFileError as error:
            lines = [f"left out: {error.strerror}"]
        _print(lines, tail.prefix if len(tails) > 1 else "")
    if follow:
        _follow(run, wanted, tails)
    return EXIT_DONE


def files(run: RunDir, wanted: WantedLogs) -> list[Path]:
    """The logs that are there; without any choice the supervisors' too."""
    config = load_resolved(run.root)
    living = [
        n for n in members_of(run, config) if n in config.groups or not all_ended(run, config, n)
    ]
    names = [wanted.group] if wanted.group else living
    found = []
    for name in names:
        incarnation = wanted.incarnation or latest_incarnation(run, name)
        found += [
            path
            for path in sorted(run.logs(name, incarnation).glob("*.log"))
            if _is_wanted(path.stem, wanted)
        ]
    if not (wanted.group or wanted.role or wanted.rank is not None or wanted.incarnation):
        found += [run.root / "supervisor.log", *sorted((run.root / "logs").glob("*.log"))]
    return [
        path for path in found if path.is_file() and (path.stat().st_size or rotated_files(path))
    ]


class Tail:
    """A file that grows, and whose beginning is cut off into parts from time to time."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path, self.prefix = path, prefix
        self._offset = 0
        self._part = 0
        """Number of the newest part that was read."""
        self._rest = b""

    def last(self, count: int) -> list[str]:
        """Last lines of the file as it is now; `new` goes on after them."""
        parts = rotated_files(self.path)
        self._part = max(map(rotation_number, parts), default=0)
        with open_in_run(self.path) as file:
            position = end = file.seek(0, 2)
            data = b""
            while position and data.count(b"\n") <= count and len(data) < _MOST_BYTES:
                size = min(_BLOCK, position)
                position -= size
                file.seek(position)
                data = file.read(size) + data
        self._offset = end
        while not position and parts and (missing := count - data.count(b"\n")) > 0:
            data = b"".join(deque(read_rotated_lines(parts.pop()), missing)) + data
        return _lines(data)[-count:] if count else []

    def new(self) -> list[str]:
        """Whole lines since the last call."""
        data = self._cut_off() + self._grown()
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [text for line in whole for text in _lines(line) or [""]]

    def _cut_off(self) -> bytes:
        """Bytes that have come and lie in a part by now: the part that holds what was read begins
        like the file did."""
        found = b""
        for part in rotated_files(self.path):
            if rotation_number(part) > self._part:
                found += read_rotated_file(part)[self._offset :]
                self._offset, self._part = 0, rotation_number(part)
        return found

    def _grown(self) -> bytes:
        with open_in_run(self.path) as file:
            file.seek(self._offset)
            data = file.read(_MOST_BYTES)
        self._offset += len(data)
        return data


def _lines(data: bytes) -> list[str]:
    return _COLOURS.sub("", data.decode(errors="replace")).splitlines()


def _follow(run: RunDir, wanted: WantedLogs, tails: dict[Path, Tail]) -> None:
    """Follow the logs until the run has ended; incarnations that come are followed too."""
    quiet_since = time.monotonic()
    while not _over(run) or time.monotonic() - quiet_since < _QUIET_S:
        for path in files(run, wanted):
            tails.setdefault(path, Tail(path, _prefix(run, path)))
        for tail in tails.values():
            # A log that leads out of the run: `main` has said so, if it was there already.
            with contextlib.suppress(ForeignFileError):
                if lines := tail.new():
                    quiet_since = time.monotonic()
                    _print(lines, tail.prefix if len(tails) > 1 else "")
        time.sleep(_LOOK_S)


def _over(run: RunDir) -> bool:
    return run.finished.exists() or bool(read_stop_request(run))


def _is_wanted(stem: str, wanted: WantedLogs) -> bool:
    """Files are named ROLE, ROLE-rank-K, ROLE-srun, and engines as they like."""
    role, _, rank = stem.partition("-rank-")
    if wanted.rank is not None and rank != str(wanted.rank):
        return False
    return not wanted.role or role == wanted.role or role.startswith(f"{wanted.role}-")


def _prefix(run: RunDir, path: Path) -> str:
    """Prefix of the lines of a log: `rollout/inc-000002/rollout-rank-0: `."""
    base = run.root / "logs" if (run.root / "logs") in path.parents else run.root
    return f"{path.relative_to(base).with_suffix('')}: "


def _print(lines: list[str], prefix: str) -> None:
    sys.stdout.writelines(f"{prefix}{escape_controls(line)}\n" for line in lines)
    sys.stdout.flush()
