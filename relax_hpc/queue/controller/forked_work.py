"""Work on the memory of a process, done by a forked child, so that the process can continue."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.net.rendezvous.process import die_with_parent

_POLL_S = 0.01


class ForkedChild:
    """One child at a time. It ends with this process, and is killed after ``longest_s``."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._child = 0
        self._started = 0.0

    @property
    def is_running(self) -> bool:
        return bool(self._child)

    def start(self, work: Callable[[], int | None]) -> None:
        """Fork a child that calls ``work``. The result is its exit code; EXIT_RETRY if it raises.
        OSError: the fork failed."""
        self._started = time.monotonic()
        self._child = os.fork()
        if not self._child:
            _work_and_exit(work)

    def poll(self) -> int | None:
        """Exit status of a child that has ended, 0 if it succeeded; returned once. None: no child
        has ended."""
        if not self._child:
            return None
        status = EXIT_DONE
        # Other code of this process may have waited for all children.
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if not pid:
                if time.monotonic() - self._started > self.longest_s:
                    os.kill(self._child, signal.SIGKILL)
                return None
        self._child = 0
        return os.waitstatus_to_exitcode(status)

    def wait(self, seconds: float) -> int | None:
        """Wait for the child, and kill it after ``seconds``; its exit status as of `poll`."""
        deadline = time.monotonic() + seconds
        while self._child and time.monotonic() < deadline:
            status = self.poll()
            if status is not None:
                return status
            time.sleep(_POLL_S)
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0
        return None


def _work_and_exit(work: Callable[[], int | None]) -> None:
    """Run the child's work and exit; does not return."""
    code: int | None = EXIT_RETRY
    try:
        die_with_parent()
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code or EXIT_DONE)
