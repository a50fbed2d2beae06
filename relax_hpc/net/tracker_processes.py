"""Processes of trackers, which the hub starts and checks. Only `close` waits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from relax_hpc.base.foreign_files import parse_json
from relax_hpc.base.rundir import RunDir, is_map
from relax_hpc.net.rendezvous.process import PARENT, clean_environment

REASON = "tracker_failed"
_REPORT_BYTES = 64 << 10
_TEXTS = ("detail", "location", "traceback")

OnFailure = Callable[[str, str, str, str, str], None]
"""Called with group, reason, detail, location and traceback, see `Board.note_first_failure`."""


class TrackerProcess:
    """Process of the tracker ``name``, which writes to ``log``."""

    def __init__(self, run: RunDir, name: str, log: Path) -> None:
        self.name = name
        command = [
            sys.executable,
            "-m",
            "relax_hpc.base.metrics.trackers",
            "--run_dir",
            str(run.root),
            "--name",
            name,
        ]
        # The tracker follows metrics.jsonl until its standard input is closed. The kernel closes
        # the pipe also if the hub is killed.
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=clean_environment() | {PARENT: str(os.getpid())},
            )

    def has_ended(self) -> bool:
        """Whether the process has exited."""
        return self._process.poll() is not None

    def finish(self) -> None:
        """Ask the process to log the remaining lines and to exit."""
        assert self._process.stdin
        if not self._process.stdin.closed:
            self._process.stdin.close()

    def wait(self, deadline: float) -> bool:
        """Whether the process exits before ``deadline``, in seconds of `time.monotonic`."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def failure(self) -> dict[str, str]:
        """Failure of the ended process: {detail, location, traceback}. Empty: it exited with 0."""
        code = self._process.returncode
        if code == 0:
            return {}
        if code < 0:
            return {"detail": f"its process was ended by signal {-code}"}
        return self._reported() or {"detail": f"its process exited with {code}; see its log"}

    def _reported(self) -> dict[str, str]:
        assert self._process.stdout
        descriptor = self._process.stdout.fileno()
        # A process that the tracker has started may keep the pipe open.
        os.set_blocking(descriptor, False)
        try:
            failure = parse_json(os.read(descriptor, _REPORT_BYTES))
        except (OSError, ValueError):
            return {}
        return failure if is_map(failure, **dict.fromkeys(_TEXTS, str)) else {}


class TrackerProcesses:
    """Processes of all trackers that a configuration names."""

    def __init__(self, run: RunDir, names: list[str], logs: Path, on_failure: OnFailure) -> None:
        """Start the processes.

        Args:
            run: directory of the run.
            names: import paths.
            logs: folder of the logs of the hub.
            on_failure: is called once for each tracker that fails.
        """
        self._on_failure = on_failure
        self._running: list[TrackerProcess] = []
        for name in names:
            log = logs / f"tracker-{name.replace(':', '.')}.log"
            try:
                self._running.append(TrackerProcess(run, name, log))
            except OSError as error:  # the log or the process cannot be created
                self._report(name, {"detail": f"cannot be started: {error}"})

    def report_failures(self) -> None:
        """Report each tracker that has failed since the last call."""
        for tracker in [tracker for tracker in self._running if tracker.has_ended()]:
            self._running.remove(tracker)
            self._report(tracker.name, tracker.failure())

    def close(self, limit_s: float) -> None:
        """Let all trackers finish within ``limit_s`` seconds, then kill the remaining ones."""
        deadline = time.monotonic() + limit_s
        for tracker in self._running:
            tracker.finish()
        for tracker in self._running:
            if not tracker.wait(deadline):
                tracker.kill()
                detail = f"had not finished {limit_s:g} s after the end of the run, and was ended"
                self._report(tracker.name, {"detail": detail})
                continue
            self._report(tracker.name, tracker.failure())
        self._running.clear()

    def _report(self, name: str, failure: dict[str, str]) -> None:
        if not failure:
            return
        # Failures with the same reason and location are reported once. The name in the location
        # distinguishes trackers.
        location = failure.get("location") or f"metrics.trackers: {name}"
        detail = f"{name}: {failure['detail']}; the run continues without it"
        self._on_failure("hub", REASON, detail, location, failure.get("traceback", ""))
