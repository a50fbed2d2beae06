"""`relax-hpc track`: follow metrics.jsonl of a run, and send its lines to a tracker.

The tracker works in a separate process, as the trackers of `metrics.trackers` do. If it fails,
hangs or crashes, this command names and counts that, and starts it again later. No process of the
run waits for either of them, and each of them may be killed: the next one continues after the last
stored line.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY, ConfigError
from relax_hpc.base.metrics.trackers import tracker_class
from relax_hpc.base.path_errors import check_may_change
from relax_hpc.base.rundir import RunDir, check_owner, read_map, write_json
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.config import load_resolved
from relax_hpc.net.tracker_processes import TrackerProcess

OPTION = "--to"
LOOK_S = 0.5
"""Seconds between two looks at the process of the tracker."""
BEAT_S = 2.0
"""Seconds between two writes of the claim, which show that this command lives."""
_QUIET_S = 10.0
"""Seconds without a new line after which a run that was stopped writes no more."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""Seconds until a failed tracker is started again: doubled from the first to the longest."""
_STUCK_CALLS = 10
"""Multiple of metrics.tracker_timeout_s without a stored line after which a process that should
finish is ended. Its watchdog cannot act while a library holds Python's lock."""
_LAST_BYTES = 256 << 10
"""Bytes at the end of metrics.jsonl that contain the end of a line."""
LAST_TRIES = 3
"""Failures in a row after which the command ends, if no more lines will come."""


@dataclass(kw_only=True, slots=True)
class TrackerFollower:
    """A process of `relax-hpc track`, as in RUN/trackers/NAME.follower.json."""

    owner: str
    """Random text of this process."""
    host: str
    pid: int
    beat_at: float
    """Time of the last beat, seconds since 1970. 0: it has ended."""
    failures: int = 0
    """Failures of the tracker since the first command for this run."""
    last_failure: str = ""
    """Text of the newest failure; empty: lines were sent since."""


class Claim:
    """Claim of this process to feed a tracker. The newest process has it."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._path = run.tracker_follower(name)
        previous = read_follower(run, name)
        self.state = TrackerFollower(
            owner=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=os.getpid(),
            beat_at=time.time(),
            failures=previous.failures if previous else 0,
        )
        self._beat_at = 0.0
        self.former = previous if previous and is_fresh(previous) else None
        """Process that has to end first, if there is one."""
        self._is_written = False

    def holds(self) -> bool:
        """Whether no newer process has claimed the tracker. Also writes the beat."""
        now = time.monotonic()
        if now < self._beat_at:
            return True
        self._beat_at = now + BEAT_S
        owner = read_map(self._path, owner=str).get("owner", self.state.owner)
        if self._is_written and owner != self.state.owner:
            return False
        self.state.beat_at = time.time()
        self.write()
        return True

    def note_failure(self, detail: str) -> None:
        """Count a failure."""
        self.state.failures += 1
        self.state.last_failure = detail
        self.write()

    def end(self) -> None:
        """Mark the end of this process."""
        self.state.beat_at = 0.0
        if read_map(self._path, owner=str).get("owner") == self.state.owner:
            self.write()

    def write(self) -> None:
        """Write the claim; a full disk is no reason to end."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            write_json(self._path, asdict(self.state))
            self._is_written = True


def complete_bytes(path: Path) -> int:
    """Bytes of the complete lines of a file; 0 if there is no file."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        begin = max(0, end - _LAST_BYTES)
        file.seek(begin)
        return begin + file.read(end - begin).rfind(b"\n") + 1


def read_follower(run: RunDir, name: str) -> TrackerFollower | None:
    """The newest process that has claimed a tracker; None: there was none."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "owner": str,
        "host": str,
        "pid": int,
        "beat_at": (int, float),
        "failures": int,
        "last_failure": str,
    }
    values = read_map(run.tracker_follower(name), **kinds)
    return TrackerFollower(**{key: values[key] for key in kinds}) if values else None


def is_fresh(follower: TrackerFollower) -> bool:
    """Whether a process may still feed its tracker, by its last beat and its process id."""
    if follower.host == socket.gethostname() and not psutil.pid_exists(follower.pid):
        return False
    return abs(time.time() - follower.beat_at) < 2 * BEAT_S


def main(root: str, name: str, once: bool) -> int:
    """Feed the tracker ``name`` until the run has ended; ``once``: with the present lines."""
    run = RunDir(Path(root))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    check_may_change(run.root)
    # The configuration of another user's run may name classes, which would run as this user.
    check_owner(run.root, "track")
    tracker_class(name, OPTION)
    config = load_resolved(run.root)
    if name in config.metrics.trackers:
        raise ConfigError(
            f"{OPTION}: found {name!r}, which metrics.trackers of the run names already; the hub "
            "feeds it"
        )
    claim = Claim(run, name)
    with contextlib.closing(_Feeder(run, name, claim, config.metrics.tracker_timeout_s)) as feeder:
        return feeder.feed(once)


class _Feeder:
    """Starts the process of the tracker, again and again if it fails."""

    def __init__(self, run: RunDir, name: str, claim: Claim, limit_s: float) -> None:
        self.run, self.name, self.claim, self.limit_s = run, name, claim, limit_s
        self._process: TrackerProcess | None = None
        self._failures_in_a_row = 0
        self._log = run.root / "logs" / f"track-{name.replace(':', '.')}.log"

    def feed(self, once: bool) -> int:
        """Exit code: 0 if all lines are sent, 75 if not."""
        self.claim.holds()
        if self.claim.former:
            self._say(
                f"takes over from process {self.claim.former.pid} on {self.claim.former.host}"
            )
            # The process before ends within a beat.
            time.sleep(2 * BEAT_S)
        while True:
            if not self.claim.holds():
                self._say("ended: a newer process of relax-hpc track feeds this tracker")
                return EXIT_DONE
            position, size = self._position(), complete_bytes(self.run.metrics)
            failure = self._run_process(once)
            if failure is None:
                continue
            if not failure and self._position() < size:
                failure = f"{self.run.tracker_state(self.name)} was not written"
            if not failure:
                self._say(f"{self._describe_progress()}")
                return EXIT_DONE
            if self._position() > position:
                self._failures_in_a_row = 0
            self._failures_in_a_row += 1
            self.claim.note_failure(failure)
            is_last = (once or self._has_ended()) and self._failures_in_a_row >= LAST_TRIES
            pause_s = self._pause_s()
            text = f"failure {self.claim.state.failures}: {failure}"
            if is_last:
                self._say(f"{text}; {self._describe_progress()}; repeat the command to log them")
                return EXIT_RETRY
            self._say(f"{text}; tries again in {pause_s:g} s (log: {self._log})")
            self._wait(pause_s)

    def _run_process(self, once: bool) -> str | None:
        """Run the tracker until it has sent all lines (empty text), fails (the failure), or a newer
        process has taken over (None)."""
        try:
            self._log.parent.mkdir(exist_ok=True)
            self._process = TrackerProcess(self.run, self.name, self._log)
        except OSError as error:
            return f"cannot be started: {error.strerror or error}"
        process, sent_at, sent = self._process, time.monotonic(), self._position()
        while not process.has_ended():
            if not self.claim.holds():
                process.kill()
                return None
            if (position := self._position()) != sent:
                sent, sent_at = position, time.monotonic()
                self.claim.state.last_failure = ""
            is_quiet = time.monotonic() - sent_at > _QUIET_S
            if once or (self._has_ended() and (is_quiet or self.run.finished.exists())):
                return self._finish(process)
            process.wait(time.monotonic() + LOOK_S)
        return self._failure_of(process)

    def _finish(self, process: TrackerProcess) -> str | None:
        """Let the tracker send the remaining lines. Its own watchdog limits each of its calls."""
        process.finish()
        sent, moved_at = self._position(), time.monotonic()
        while not process.wait(time.monotonic() + LOOK_S):
            if not self.claim.holds():
                process.kill()
                return None
            if (position := self._position()) != sent:
                sent, moved_at = position, time.monotonic()
            stuck_s = time.monotonic() - moved_at
            if stuck_s > _STUCK_CALLS * self.limit_s:
                process.kill()
                return f"sent nothing for {stuck_s:.0f} s, and was ended"
        return self._failure_of(process)

    def _failure_of(self, process: TrackerProcess) -> str:
        self._process = None
        return " ".join(process.failure().get("detail", "").split())

    def _pause_s(self) -> float:
        doublings = min(self._failures_in_a_row - 1, 10)
        return float(min(FIRST_PAUSE_S * 2**doublings, LONGEST_PAUSE_S))

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.claim.holds():
            time.sleep(min(LOOK_S, max(0.0, deadline - time.monotonic())))

    def _has_ended(self) -> bool:
        return self.run.finished.exists() or bool(read_stop_request(self.run))

    def _position(self) -> int:
        """Bytes of metrics.jsonl that the tracker has."""
        return int(read_map(self.run.tracker_state(self.name), offset=int).get("offset", 0))

    def _describe_progress(self) -> str:
        missing = max(0, complete_bytes(self.run.metrics) - self._position())
        failures = self.claim.state.failures
        text = (
            "all lines are logged" if not missing else f"{missing} bytes of metrics are not logged"
        )
        return f"{text}, {failures} failures in all" if failures else text

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{self.name}: {escape_line(text)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the tracker: after Ctrl-C it may finish within the limit of its calls."""
        process, self._process = self._process, None
        if process and not process.has_ended():
            process.finish()
            if not process.wait(time.monotonic() + self.limit_s):
                process.kill()
        self.claim.end()


def follower_states(run: RunDir) -> Iterator[tuple[str, TrackerFollower, int]]:
    """(name, process, bytes of metrics.jsonl that it lacks) of each tracker that
    `relax-hpc track` feeds or has fed."""
    size = complete_bytes(run.metrics)
    for path in sorted((run.root / "trackers").glob("*.follower.json")):
        name = path.name.removesuffix(".follower.json")
        follower = read_follower(run, name)
        if follower is not None:
            offset: Any = read_map(run.tracker_state(name), offset=int).get("offset", 0)
            yield name, follower, max(0, size - offset)
