"""Lease of the supervisor: the holder beats in a file, and a candidate takes over once it stands
still for a lease."""

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
_NOBODY = 0
"""Number in place of a pid: the holder has given the lease up."""
_OUTCOME_S = 3.0


class Lease:
    """The right to supervise under ``name``. ``node`` is where this process runs, ``allocation``
    its life of its job.

    What another allocation holds is free once that is ``gone``; an orphan of it is fenced by its
    incarnation. The file is written in place and closed: that is what network filesystems show to
    others soonest.

    On a disk that takes nothing nobody can beat, so that stillness says nothing there: a candidate
    counts it only while it can write itself, and a head that has lived through an outage goes on.
    One whose own node alone has lost the disk does lose the lease. The incarnation keeps the two
    apart whoever is wrong: it is taken by exclusive create, and a supervisor that cannot see
    whether there is a newer one does nothing until it can.
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
        """Number of supervisors so far, when the lease was found free."""
        self._seen, self._since = ("", 0), time.monotonic()
        self._tried_at = 0.0
        """Time at which this candidate last wrote there itself."""
        self._alive_until = 0.0
        self._incarnation = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    # -- as a candidate ----------------------------------------------------------------------------

    def free(self) -> bool:
        """Whether nobody holds it; to be asked again and again, as stillness takes time to see.

        Of several candidates that find it free one gets the incarnation after ``former``.
        """
        try:
            self.former = latest_incarnation(self.run, self.name)
            text = self.path.read_text(errors="replace")
        except FileNotFoundError:
            text = ""
        except OSError as error:
            if not is_temporary(error):
                raise
            self._since = time.monotonic()
            return False
        if (seen := (text, self.former)) != self._seen:
            self._seen, self._since = seen, time.monotonic()
        if not self.former or self._stands_still():
            return True
        try:
            holder = json.loads(text)
            # Else somebody has taken the next incarnation, and is about to beat.
            return holder["incarnation"] == self.former and self._left(holder)
        except (ValueError, LookupError, TypeError, RecursionError):
            # Read in the middle of a beat, or of the making of the file; if it is not, it stands
            # still.
            return False

    def _stands_still(self) -> bool:
        """Whether nobody has beaten for a lease, although that could be written.

        It is tried in the second half of a lease, as often as a holder beats: an outage that is
        over before that leaves a holder the time to be seen.
        """
        now = time.monotonic()
        still_s = now - self._since
        if still_s > self.limits.lease_s / 2 and now - self._tried_at > self.limits.beat_s:
            self._tried_at = now
            if probe_folder(self.path.parent, _WIDTH):
                self._since = now
        return now - self._since > self.limits.lease_s

    def _left(self, holder: dict) -> bool:
        if holder["pid"] == _NOBODY:
            return True
        if holder["allocation"] != self.allocation:
            return self.gone(holder["allocation"])
        return holder["node"] == self.node and not psutil.pid_exists(holder["pid"])

    # -- as the holder -----------------------------------------------------------------------------

    def hold(self, incarnation: int) -> None:
        """Begin to beat, as long as `tick` is called. A disk that takes nothing is not waited
        for."""
        self._incarnation = incarnation
        self.tick()
        with contextlib.suppress(OSError):
            self._write(0, os.getpid())
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """The holder gets on with its work. If it does not for long, it shall lose the lease."""
        self._alive_until = time.monotonic() + max(60.0, 2 * self.limits.lease_s)

    def give_up(self) -> None:
        """Give the lease up at once to the next candidate."""
        self._stop()
        if self._incarnation:
            # On an ill disk the next one finds that it stands still.
            with contextlib.suppress(OSError):
                self._write(0, _NOBODY)

    def lose(self) -> None:
        """Give the lease up, as another holds it: beat no more, and leave the file alone."""
        self._stop()

    def _stop(self) -> None:
        self._end.set()
        if self._thread:
            self._thread.join()

    def _beat(self) -> None:
        beat = 0
        while not self._end.wait(self.limits.beat_s):
            # A filesystem that hangs for a moment must not end the beating.
            with contextlib.suppress(OSError):
                if (
                    time.monotonic() < self._alive_until
                    and latest_incarnation(self.run, self.name) == self._incarnation
                ):
                    beat += 1
                    self._write(beat, os.getpid())

    def _write(self, beat: int, pid: int) -> None:
        about = {
            "incarnation": self._incarnation,
            "beat": beat,
            "node": self.node,
            "allocation": self.allocation,
            "pid": pid,
        }
        text = json.dumps(about)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, text.ljust(_WIDTH).encode())
        finally:
            os.close(file)


def holder_of(run: RunDir, name: str) -> dict:
    """Holder of the lease as its file says: incarnation, beat, node, allocation, pid; empty while
    it cannot be read."""
    return read_map(
        run.rendezvous(name) / "lease", incarnation=int, beat=int, node=str, allocation=str, pid=int
    )


def leave_outcome(run: RunDir, name: str, allocation: str, code: int) -> None:
    """Tell the candidates of an allocation that supervision is over, and how; on a full disk after
    a while in vain.

    Whoever ended for want of room must still come to requeue the job.
    """
    path = run.rendezvous(name) / f"outcome-{allocation}.json"
    with contextlib.suppress(OSError):
        retry_write(path, lambda: write_json(path, {"code": code}), has_passed_in(_OUTCOME_S))


def outcome_of(run: RunDir, name: str, allocation: str) -> int | None:
    """The exit code that supervision in an allocation ended with; None while it goes on."""
    return read_map(run.rendezvous(name) / f"outcome-{allocation}.json", code=int).get("code")
