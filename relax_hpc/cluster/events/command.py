"""Command of the site that receives events (`site.on_event`), one at a time.

It gets the event as one JSON document on standard input. No shell runs it. `poll` never waits: the
supervisor calls it in each round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from relax_hpc.base.log_rotation import rotate_log
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.events.log import Event, EventLog
from relax_hpc.config.schema import Config

FORMAT = 1
"""Format of the document. It rises if a field changes its meaning."""
TRIES = 3
PAUSE_S = 30.0
"""Seconds between two tries of one event."""
_LOOK_S = 0.05


class EventCommand:
    """Gives the unsent events of a log to the command."""

    def __init__(
        self, run: RunDir, config: Config, log: EventLog, say: Callable[[str], None]
    ) -> None:
        self.run, self.config, self.log, self._say = run, config, log, say
        self._process: subprocess.Popen[bytes] | None = None
        self._event: Event | None = None
        """Event that the running command has."""
        self._deadline = 0.0
        self._failures = 0
        """Failures with the oldest unsent event."""
        self._next_try = 0.0
        self._is_failing = False
        """Whether the last try has failed, which was said."""

    def poll(self) -> None:
        """Judge the running command, and start the next one."""
        if not self.config.site.on_event:
            self.log.unsent.clear()
            return
        # One command at a time, so that events arrive in their order.
        if self._process is not None and not self._has_ended(self._process):
            return
        if self.log.unsent and time.monotonic() >= self._next_try:
            self._start(self.log.unsent[0])

    def finish(self, limit_s: float) -> None:
        """Give the remaining events to the command, within ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        self._next_try = 0.0
        self.poll()
        while (self._process or self.log.unsent) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            self.poll()
        if self._process:
            self._kill(self._process)
            self._process = None

    def _start(self, event: Event) -> None:
        command = self.config.site.on_event
        document = json.dumps(describe_event(self.run, self.config, event)).encode() + b"\n"
        self._event, self._deadline = event, time.monotonic() + self.config.events.command_s
        # A pipe could block this process if the command does not read it.
        descriptor = os.memfd_create("event")
        try:
            os.write(descriptor, document)
            os.lseek(descriptor, 0, os.SEEK_SET)
            output = self._open_output()
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=descriptor,
                    stdout=output,
                    stderr=output,
                    # Its own session, so that its children are ended with it.
                    start_new_session=True,
                )
            finally:
                os.close(output)
        except (OSError, ValueError) as error:
            self._note_failure(getattr(error, "strerror", None) or str(error))
        finally:
            os.close(descriptor)

    def _open_output(self) -> int:
        """Descriptor of RUN/logs/on_event.log, or of the null device if it cannot be written."""
        path = self.run.root / "logs" / "on_event.log"
        # On a full disk the command still runs, because it may report just that.
        with suppress(OSError):
            rotate_log(path)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        code = process.poll()
        if code is None and time.monotonic() < self._deadline:
            return False
        self._process = None
        # A command that hangs would hold back all later events.
        if code is None:
            self._kill(process)
            self._note_failure(f"ended after events.command_s={self.config.events.command_s:g} s")
        elif code:
            self._note_failure(f"exit code {code}" if code > 0 else f"ended by signal {-code}")
        else:
            assert self._event is not None
            self.log.note_sent(self._event)
            self._failures, self._is_failing = 0, False
        return True

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End the command and its children."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _note_failure(self, reason: str) -> None:
        """Count a failure, say the first one, and drop the event after `TRIES` of them."""
        assert self._event is not None
        self._failures += 1
        self._next_try = time.monotonic() + PAUSE_S
        # One line for each series of failures: a service may be away for hours.
        if not self._is_failing:
            # Arguments of the command may hold a token.
            self._say(f"site.on_event: {self.config.site.on_event[0]}: {reason}")
        self._is_failing = True
        if self._failures >= TRIES:
            text = f"event {self._event.number} ({self._event.event}) was not delivered"
            self._say(f"site.on_event: {text} in {TRIES} tries; it is in {self.run.notifications}")
            self.log.note_sent(self._event, self._failures)
            self._failures = 0


def describe_event(run: RunDir, config: Config, event: Event) -> dict[str, Any]:
    """The document for the command."""
    return {
        "format": FORMAT,
        **asdict(event),
        "steps": config.steps,
        "run": {
            "name": config.name,
            "run_dir": str(run.root),
            "layout": config.layout,
            "job": os.environ.get("SLURM_JOB_ID", ""),
        },
    }
