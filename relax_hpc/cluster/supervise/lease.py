"""Lease of the supervisor. The holder writes heartbeats to a file; a candidate takes over if the
file does not change for the length of a lease."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable

import psutil

from relax_hpc.base.disk_waits import has_passed_in, is_temporary, probe_folder, retry_write
from relax_hpc.base.rundir import RunDir, read_map, write_json
from relax_hpc.config.schema import LivenessConfig
from relax_hpc.net.rendezvous.roster import latest_incarnation

_WIDTH = 512
_RELEASED = 0
"""Number in place of a pid after the holder has released the lease."""
_OUTCOME_S = 3.0


class Lease:
    """The right to supervise under ``name``. ``node`` is the node of this process, ``allocation``
    its job with the number of restarts.

    A lease of another allocation is free if that allocation is ``gone``. Processes that survive it
    are fenced by their incarnation. The file is written in place and closed, because network file
    systems show such a change to other nodes soonest.

    No holder can write a heartbeat on a full disk. A candidate therefore counts the silence only
    while it can write itself, and a holder continues after an outage. A holder loses the lease if
    only its own node has lost the disk. The incarnation separates two supervisors in any case: it
    is taken by exclusive create, and a supervisor that cannot read whether there is a newer one
    does nothing until it can.
    """

    def __init__(
        self,
        run: RunDir,
        name: str,
        limits: LivenessConfig,
        node: str,
        allocation: str = "",
        gone: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.run, self.name, self.limits, self.node, self.allocation = (
            run,
            name,
            limits,
            node,
            allocation,
        )
        self.gone = gone
        self.path = run.rendezvous(name) / "lease"
        self.former = 0
        """Number of the newest supervisor when the lease was free."""
        self._last_content, self._changed_at = ("", 0), time.monotonic()
        self._probed_at = 0.0
        """Time at which this candidate last probed the disk, monotonic seconds."""
        self._renewed_until = 0.0
        self._incarnation = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    # -- as a candidate ----------------------------------------------------------------------------

    def is_free(self) -> bool:
        """Whether the lease has no living holder. The caller repeats this, because silence is
        known only after the length of a lease.

        If several candidates find it free, one of them gets the incarnation after ``former``.
        """
        try:
            self.former = latest_incarnation(self.run, self.name)
            text = self.path.read_text(errors="replace")
        except FileNotFoundError:
            text = ""
        except OSError as error:
            if not is_temporary(error):
                raise
            self._changed_at = time.monotonic()
            return False
        content = (text, self.former)
        if content != self._last_content:
            self._last_content, self._changed_at = content, time.monotonic()
        if not self.former or self._is_silent():
            return True
        try:
            holder = json.loads(text)
            # Otherwise another supervisor has taken the next incarnation and will write soon.
            return holder["incarnation"] == self.former and self._has_ended(holder)
        except (ValueError, LookupError, TypeError, RecursionError):
            # The file was read while it was written. If it is broken for another reason, it does
            # not change, and the lease becomes free by silence.
            return False

    def _is_silent(self) -> bool:
        """Whether no heartbeat was written for the length of a lease, although the disk could be
        written.

        The disk is probed in the second half of a lease, once in each heartbeat interval. After an
        outage that ends earlier, a holder has enough time to write a heartbeat.
        """
        now = time.monotonic()
        silent_s = now - self._changed_at
        if silent_s > self.limits.lease_s / 2 and now - self._probed_at > self.limits.beat_s:
            self._probed_at = now
            if probe_folder(self.path.parent, _WIDTH):
                self._changed_at = now
        return now - self._changed_at > self.limits.lease_s

    def _has_ended(self, holder: dict) -> bool:
        """Whether a holder has released the lease, or has certainly ended."""
        if holder["pid"] == _RELEASED:
            return True
        if holder["allocation"] != self.allocation:
            return self.gone(holder["allocation"])
        return holder["node"] == self.node and not psutil.pid_exists(holder["pid"])

    # -- as the holder -----------------------------------------------------------------------------

    def acquire(self, incarnation: int) -> None:
        """Begin to write heartbeats, which continue as long as `renew` is called. This does not
        wait for a full disk."""
        self._incarnation = incarnation
        self.renew()
        with contextlib.suppress(OSError):
            self._write(0, os.getpid())
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Report that the holder makes progress. A holder that hangs loses the lease."""
        self._renewed_until = time.monotonic() + max(60.0, 2 * self.limits.lease_s)

    def release(self) -> None:
        """Release the lease, so that the next candidate takes it immediately."""
        self.stop_beating()
        if self._incarnation:
            # If the disk fails, the next candidate takes the lease after the usual silence.
            with contextlib.suppress(OSError):
                self._write(0, _RELEASED)

    def stop_beating(self) -> None:
        """Write no more heartbeats, and do not touch the file, because another supervisor holds
        the lease."""
        self._end.set()
        if self._thread:
            self._thread.join()

    def _beat(self) -> None:
        beat = 0
        while not self._end.wait(self.limits.beat_s):
            # A file system that hangs for a moment must not end the heartbeats.
            with contextlib.suppress(OSError):
                if (
                    time.monotonic() < self._renewed_until
                    and latest_incarnation(self.run, self.name) == self._incarnation
                ):
                    beat += 1
                    self._write(beat, os.getpid())

    def _write(self, beat: int, pid: int) -> None:
        holder = {
            "incarnation": self._incarnation,
            "beat": beat,
            "node": self.node,
            "allocation": self.allocation,
            "pid": pid,
        }
        text = json.dumps(holder)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, text.ljust(_WIDTH).encode())
        finally:
            os.close(file)


def lease_holder(run: RunDir, name: str) -> dict:
    """Holder of the lease from its file: incarnation, beat, node, allocation, pid. Empty if the
    file cannot be read."""
    return read_map(
        run.rendezvous(name) / "lease", incarnation=int, beat=int, node=str, allocation=str, pid=int
    )


def write_outcome(run: RunDir, name: str, allocation: str, code: int) -> None:
    """Record for the candidates of an allocation that supervision has ended, with its exit code.

    On a full disk this fails without an error after a few seconds, because the supervisor must
    still requeue its job.
    """
    path = run.rendezvous(name) / f"outcome-{allocation}.json"
    with contextlib.suppress(OSError):
        retry_write(path, lambda: write_json(path, {"code": code}), has_passed_in(_OUTCOME_S))


def read_outcome(run: RunDir, name: str, allocation: str) -> int | None:
    """The exit code of supervision in an allocation; None if it has not ended."""
    return read_map(run.rendezvous(name) / f"outcome-{allocation}.json", code=int).get("code")
