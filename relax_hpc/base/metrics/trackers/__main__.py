"""`python -m relax_hpc.base.metrics.trackers`: the process of one tracker, which the hub or
`relax-hpc track` starts.

It follows metrics.jsonl until its standard input is closed, then logs the remaining lines and
finishes the tracker. If the tracker fails, it writes the reason to standard output as one JSON
object and exits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_hpc.base.error_origin import ErrorOrigin, describe_error, format_stack, locate_error
from relax_hpc.base.errors import RelaxError
from relax_hpc.base.log_rotation import LogRotator, find_own_log
from relax_hpc.base.metrics.read import count_lines, parse_lines
from relax_hpc.base.metrics.trackers import Tracker, make_tracker
from relax_hpc.base.metrics.writer import RESERVED
from relax_hpc.base.rundir import RunDir, read_map, write_json
from relax_hpc.config import load_resolved, to_dict
from relax_hpc.net.rendezvous.process import (
    STOP_SIGNALS,
    die_with_parent,
    install_stack_dump,
    set_private_umask,
)

LOOK_S = 0.2
"""Seconds between two reads of metrics.jsonl."""
_BLOCK_BYTES = 256 << 10
"""Bytes that are logged before the offset is stored. A line has a few thousand."""


class Follower:
    """Lines of metrics.jsonl that no earlier process of this tracker has logged."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._path = run.metrics
        self._state = run.tracker_state(name)
        self._offset = max(0, read_map(self._state, offset=int).get("offset", 0))
        self._line_number = count_lines(self._path, self._offset)

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """The next lines that are complete, each with its number in the file; empty: there are
        none yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read(_BLOCK_BYTES)
        except FileNotFoundError:
            return []
        complete = block[: block.rfind(b"\n") + 1]
        if not complete and len(block) == _BLOCK_BYTES:
            complete = block  # No line of metrics is so long: skip it.
        numbered = list[tuple[int, dict[str, Any]]]()
        for number, text in enumerate(complete.split(b"\n"), start=self._line_number):
            numbered += [(number, line) for line in parse_lines([text])[0]]
        self._offset += len(complete)
        self._line_number += complete.count(b"\n")
        # A block with only incomplete lines must not end the reading of later blocks.
        return numbered if numbered or not complete else self.read()

    def store(self) -> None:
        """Store the offset of the logged lines for the next process of this tracker."""
        # If the disk is full, some lines are logged twice after a restart.
        with contextlib.suppress(OSError):
            self._state.parent.mkdir(exist_ok=True)
            write_json(self._state, {"offset": self._offset})


class Watchdog:
    """Ends this process if one call of the tracker takes longer than ``limit_s``."""

    def __init__(self, limit_s: float, report: int) -> None:
        self._limit_s = limit_s
        self._report = report
        self._main = threading.get_ident()
        self._deadline = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Limit the time of the block."""
        self._deadline = time.monotonic() + self._limit_s
        yield
        self._deadline = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._limit_s / 4))
            if time.monotonic() > self._deadline:
                frame = sys._current_frames()[self._main]
                detail = f"a call took longer than metrics.tracker_timeout_s, {self._limit_s:g} s"
                _report(self._report, detail, format_stack(traceback.extract_stack(frame)))
                os._exit(1)


def follow(tracker: Tracker, follower: Follower, watchdog: Watchdog) -> None:
    """Log lines until standard input is closed, then the remaining lines."""
    is_last = False
    while not is_last:
        # The hub writes nothing to standard input: it can be read once it is closed.
        is_last = bool(select.select([0], [], [], LOOK_S)[0])
        while lines := follower.read():
            for number, line in lines:
                with watchdog.watching():
                    tracker.line_number = number
                    _log(tracker, line)
            with watchdog.watching():
                tracker.flush()
            follower.store()
    with watchdog.watching():
        tracker.finish()


def _log(tracker: Tracker, line: dict[str, Any]) -> None:
    if "event" in line:
        tracker.rolled_back(line["step"])
        return
    values = {tag: value for tag, value in line.items() if tag not in RESERVED}
    tracker.log(line["step"], values, line["time"])


def _report(descriptor: int, detail: str, origin: ErrorOrigin) -> None:
    """Write a failure for the hub, which reads it once this process has ended."""
    failure = {"detail": detail, "location": origin.location, "traceback": origin.traceback}
    os.write(descriptor, json.dumps(failure).encode())


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m relax_hpc.base.metrics.trackers", description=__doc__
    )
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--name", required=True, help="name of the tracker")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run a tracker; 1: it has failed."""
    args = parse(argv)
    die_with_parent()
    set_private_umask()
    # Slurm and terminals signal every process of a job. The hub decides when a tracker ends.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    install_stack_dump()
    # What a tracker prints belongs in the log, standard error.
    report = os.dup(1)
    os.dup2(2, 1)
    LogRotator(find_own_log())
    run = RunDir(args.run_dir)
    config = load_resolved(run.root)
    watchdog = Watchdog(config.metrics.tracker_timeout_s, report)
    try:
        with watchdog.watching():
            tracker = make_tracker(args.name, run.root, to_dict(config))
        follow(tracker, Follower(run, args.name), watchdog)
    except (Exception, SystemExit) as error:  # a user's class may raise anything, and end itself
        # The log may be on a full disk, which is the failure to report.
        with contextlib.suppress(OSError):
            traceback.print_exc()
        cause = error.__cause__ if isinstance(error, RelaxError) and error.__cause__ else error
        _report(report, describe_error(error), locate_error(cause))
        return 1
    return 0


if __name__ == "__main__":
    # Threads of a failed tracker do not keep the process.
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
